// The order of what the site's search finds: pages with the words in their title, guides before reference, settings first.
// And what stands below each: the page's promise, or what the setting means (PROMISES, from docs/sources.py).
var Scorer = {
  objNameMatch: 22,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  guides: ["Start", "Your own task"],
  aside: /^(api\/|CHANGELOG|CONTRIBUTING|AGENTS|emulator\/)/,
  captions: null, // by page: Start, or the page of the sidebar that lists it

  section(page) {
    if (!this.captions) {
      this.captions = {};
      const root = new URL(document.documentElement.dataset.content_root, location.href).href;
      for (const link of document.querySelectorAll(".sidebar-tree a.reference.internal")) {
        const caption = link.closest(".sidebar-tree > ul")?.previousElementSibling?.textContent.trim() ?? "";
        const hub = link.closest(".sidebar-tree > ul > li")?.querySelector("a").textContent.trim() ?? "";
        const name = link.href.replace(root, "").replace(/\.html.*/, "");
        this.captions[name] = caption === "Start" ? caption : hub;
      }
    }
    return this.captions[page] ?? "";
  },

  score([page, title, , description, score, , kind]) {
    const asked = (new URLSearchParams(location.search).get("q") ?? "").trim().toLowerCase();
    const words = splitQuery(asked).filter((word) => !stopwords.has(word));
    if (kind === "object") {
      const parts = title.toLowerCase().split(/[._]/);
      const begins = asked.split(/[\s._]+/).some((word) => parts.some((part) => part.startsWith(word)));
      if (title.toLowerCase() === asked.replace(/\s+/g, "_")) score += 15; // "learning rate"; before a sub-config's own
      return score + (description.startsWith("setting,") ? 10 : 0) - (begins ? 0 : 30); // "verl" is not in "overlong"
    }
    const there = words.filter((word) => title.toLowerCase().includes(word.replace(/s$/, "")));
    score += words.length ? (10 * there.length) / words.length : 0;
    if (this.guides.includes(this.section(page))) score += 4;
    return this.aside.test(page) ? score - 12 : score;
  },
};

document.addEventListener("DOMContentLoaded", () => {
  const found = document.getElementById("search-results");
  const explain = () => {
    for (const item of found.querySelectorAll("li:not(.explained)")) {
      item.classList.add("explained");
      const [page, anchor] = item.querySelector("a").getAttribute("href").replace(".html", "").split("#");
      const promise = PROMISES[`${page}#${anchor}`] ?? (page.startsWith("api/") && anchor ? null : PROMISES[page]);
      if (promise) item.append(Object.assign(document.createElement("p"), { className: "context", textContent: promise }));
    }
  };
  if (!found) return;
  new MutationObserver(explain).observe(found, { childList: true, subtree: true });
  explain();
});
