// Scores of search results: Sphinx's own, but a heading that the query names comes first.
var Scorer = {
  score: ([page, title, anchor, text, score, file, kind]) =>
    kind === "title" ? score + 100 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
