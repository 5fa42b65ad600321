// The order of what the site's search finds: pages with the words in their title, guides before reference, settings first.
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
  aside: /^(api\/|CHANGELOG|CONTRIBUTING|AGENTS|7\d_emulator)/,
  captions: null, // of the sidebar, by page

  section(page) {
    if (!this.captions) {
      this.captions = {};
      const root = new URL(document.documentElement.dataset.content_root, location.href).href;
      for (const link of document.querySelectorAll(".sidebar-tree a.reference.internal")) {
        const caption = link.closest(".sidebar-tree > ul")?.previousElementSibling;
        const name = link.href.replace(root, "").replace(/\.html.*/, "");
        this.captions[name] = caption?.textContent.trim() ?? "";
      }
    }
    return this.captions[page] ?? "";
  },

  score([page, title, , description, score, , kind]) {
    if (kind === "object") return score + (description.startsWith("setting,") ? 10 : 0);
    const asked = new URLSearchParams(location.search).get("q") ?? "";
    const words = splitQuery(asked.toLowerCase()).filter((word) => !stopwords.has(word));
    const there = words.filter((word) => title.toLowerCase().includes(word.replace(/s$/, "")));
    score += words.length ? (10 * there.length) / words.length : 0;
    if (this.guides.includes(this.section(page))) score += 4;
    return this.aside.test(page) ? score - 12 : score;
  },
};
