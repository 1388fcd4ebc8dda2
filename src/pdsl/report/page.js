// Says what is under the pointer, or under a finger.
const tip = document.getElementById("tip");
const show = (event) => {
  const mark = event.target.closest("[data-tip]");
  tip.hidden = !mark;
  if (!mark) return;
  const of = mark.parentNode.dataset.of;
  tip.textContent = (of ? of + "\n" : "") + mark.dataset.tip;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  const top = below + tip.offsetHeight < innerHeight ? below : event.clientY - tip.offsetHeight - 12;
  tip.style.translate = `${Math.max(8, left)}px ${top}px`;
};
addEventListener("pointermove", show);
addEventListener("pointerdown", show);
