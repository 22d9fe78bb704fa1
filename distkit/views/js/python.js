// Syntax highlighting for Python: strings, comments, keywords, numbers, communication calls.

const KEYWORDS = "False None True and as assert async await break case class continue def del " +
  "elif else except finally for from global if import in is lambda match nonlocal not or pass " +
  "raise return try while with yield";
const COMMUNICATION = "i?send|i?recv|(?:send|recv)_object_list|broadcast\\w*|scatter\\w*|" +
  "(?:all_)?(?:reduce|gather)\\w*|all_to_all\\w*|(?:monitored_)?barrier|" +
  "batch_isend_irecv|new_(?:sub)?groups?\\w*";
const TOKEN = new RegExp([
  String.raw`(?<comment>#[^\n]*)`,
  String.raw`(?<string>\b[rbfuRBFU]{0,2}(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$))`,
  String.raw`\b[rbfuRBFU]{0,2}(?:"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)`,
  String.raw`(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))`,
  String.raw`(?<communication>\b(?:torch\.distributed|dist)\.(?:${COMMUNICATION})\b|\.wait(?=\())`,
  String.raw`(?<keyword>\b(?:${KEYWORDS.replaceAll(" ", "|")})\b)`,
  String.raw`(?<number>\b\d[\w.]*)`,
  String.raw`(?<name>[A-Za-z_]\w*)`,
].join("|"), "gu");

// The lines of a text, each a list of [kind, text]; kind "" is plain.
export function tokenize(text) {
  const lines = [[]];
  const put = (kind, piece) => piece.split("\n").forEach((part, i) => {
    if (i) lines.push([]);
    if (part) lines.at(-1).push([kind, part]);
  });
  let end = 0;
  for (const match of text.matchAll(TOKEN)) {
    put("", text.slice(end, match.index));
    const [kind] = Object.entries(match.groups).find(([, value]) => value !== undefined);
    put(kind === "name" ? "" : kind, match[0]);
    end = match.index + match[0].length;
  }
  put("", text.slice(end));
  return lines;
}
