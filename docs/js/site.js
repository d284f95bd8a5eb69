// What the theme makes by script gets a name, and what scrolls can be scrolled by keys.
(() => {
  const mend = () => {
    document.querySelectorAll("nav.md-code__nav").forEach((nav, at) => nav.setAttribute("aria-label", `Code block ${at + 1}`));
    document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset .drawing-box, .md-typeset .output").forEach((box) => {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    });
  };
  let waiting = 0;
  const soon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(mend, 50);
  };
  new MutationObserver(soon).observe(document.body, { childList: true, subtree: true });
  addEventListener("resize", soon);
  mend();
})();
