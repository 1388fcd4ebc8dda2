// Tabs, and tips with exact values for pointer, touch and arrow keys. Without JavaScript, all panels are shown in order.
const tip = document.getElementById("tip");
let chosen = location.hash.slice(1); // name of the open tab
let mark = null; // element the tip describes
let pointer = null; // last pointer event

const show = (next, x, y) => {
  mark?.classList.remove("at");
  mark = next;
  tip.hidden = !mark;
  if (!mark) return;
  mark.classList.add("at");
  const of = mark.parentNode.dataset.of;
  tip.textContent = (of ? of + "\n" : "") + (mark.dataset.tip ?? mark.title);
  const left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8);
  const top = y + 18 + tip.offsetHeight < innerHeight ? y + 18 : y - tip.offsetHeight - 12;
  tip.style.translate = `${Math.max(8, left)}px ${Math.max(8, top)}px`;
};
// A mouse shows the meaning of a term by itself; a finger needs the tip.
const point = (event) => {
  if (drag?.box) return;
  pointer = event;
  const told = event.pointerType === "mouse" ? "[data-tip]" : "[data-tip], abbr[title]";
  show(event.target.closest?.(told) ?? null, event.clientX, event.clientY);
};
const step = (to) => {
  const box = to.getBoundingClientRect();
  if (box.top < 0 || box.bottom > innerHeight) to.scrollIntoView({ block: "center" });
  const now = to.getBoundingClientRect();
  show(to, now.left + now.width / 2, now.top + Math.min(now.height / 2, 40));
};

const open = (name) => {
  chosen = name;
  for (const tab of document.querySelectorAll('[role="tab"]')) {
    const is = tab.dataset.part === name;
    tab.setAttribute("aria-selected", is);
    tab.tabIndex = is ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).classList.toggle("open", is);
  }
};
// Also called by a live report after each update.
const arrange = () => {
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  if (tabs.length) {
    document.body.classList.add("tabbed");
    document.querySelector('[role="tablist"]').hidden = false;
    open(tabs.some((tab) => tab.dataset.part === chosen) ? chosen : tabs[0].dataset.part);
  }
  for (const figure of document.querySelectorAll('svg[role="img"]')) {
    if (figure.querySelector("[data-tip]")) figure.tabIndex = 0;
  }
  restoreZooms();
};

const alongTabs = (tabs, at, key) => {
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[key];
  return to === undefined ? null : tabs[(to + tabs.length) % tabs.length];
};
const alongMarks = (figure, key) => {
  const marks = [...figure.querySelectorAll("[data-tip]")];
  const at = marks.indexOf(mark);
  if (at < 0) return key.startsWith("Arrow") || key === "Home" ? marks[0] : key === "End" ? marks.at(-1) : null;
  const row = [...mark.parentNode.querySelectorAll(":scope > [data-tip]")];
  const aside = row.length < marks.length ? row.length : 1; // ArrowUp and ArrowDown move by a row
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + aside, ArrowUp: at - aside, Home: 0 }[key];
  if (key === "End") return marks.at(-1);
  return to === undefined ? null : marks[Math.max(0, Math.min(marks.length - 1, to))];
};

addEventListener("pointermove", point);
addEventListener("pointerdown", point);
addEventListener("focusout", () => show(null));
addEventListener("click", (event) => {
  const tab = event.target.closest?.('[role="tab"]');
  if (!tab) return;
  open(tab.dataset.part);
  history.replaceState(null, "", `#${tab.dataset.part}`);
});
addEventListener("keydown", (event) => {
  const focused = document.activeElement;
  let to = null;
  if (event.key === "Escape") show(null);
  else if (focused.matches('[role="tab"]')) {
    const tabs = [...document.querySelectorAll('[role="tab"]')];
    to = alongTabs(tabs, tabs.indexOf(focused), event.key);
    to?.focus();
    to?.click();
  } else if (focused.matches('svg[role="img"]')) {
    to = alongMarks(focused, event.key);
    if (to) step(to);
  }
  if (to) event.preventDefault();
});
addEventListener("hashchange", () => { chosen = location.hash.slice(1); arrange(); });
arrange();
