// Live report: fetches itself every second and replaces the content if it has changed.
let tag = "";
const follow = async () => {
  try {
    const answer = await fetch("/", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag");
      replace(new DOMParser().parseFromString(await answer.text(), "text/html"));
    }
  } catch {
    const state = document.querySelector(".state");
    if (state) state.textContent = "pdsl watch has stopped; this is the last version it served.";
    tag = "";
  }
  setTimeout(follow, 1000);
};
// Keeps the open tab, the scroll position, the focus and the tip.
const replace = (page) => {
  const focused = document.activeElement, at = scrollY, marked = mark;
  const within = (root) => [...root.querySelectorAll('[role="tab"], svg[role="img"]')];
  const nth = within(document).indexOf(focused);
  const nthMark = marked && focused.contains(marked) ? [...focused.querySelectorAll("[data-tip]")].indexOf(marked) : -1;
  for (const part of ["header", "main"]) document.querySelector(part).replaceWith(page.querySelector(part));
  document.title = page.title;
  arrange();
  scrollTo(0, at);
  if (nth >= 0) within(document)[nth]?.focus({ preventScroll: true });
  const marks = nthMark < 0 ? [] : document.activeElement.querySelectorAll("[data-tip]");
  if (marks[nthMark]) step(marks[nthMark]);
  else if (marked && pointer) {
    const under = document.elementFromPoint(pointer.clientX, pointer.clientY);
    show(under?.closest("[data-tip]") ?? null, pointer.clientX, pointer.clientY);
  }
};
setTimeout(follow, 1000);
