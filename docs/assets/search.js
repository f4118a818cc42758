// Drop frequent words from a query. The theme adds a wildcard to every word, so that "a" would match all titles
// that begin with this letter.
const FREQUENT = /^(a|after|an|and|are|at|by|can|do|does|for|from|how|i|in|is|it|my|of|on|or|out|the|to|what|when|where|which|why|with)$/i
const QUERY = 2
const post = Worker.prototype.postMessage
Worker.prototype.postMessage = function (message, ...rest) {
  if (message?.type === QUERY && typeof message.data === "string") {
    const words = message.data.split(/\s+/).filter((word) => !FREQUENT.test(word.replace(/\*$/, "")))
    message = { ...message, data: words.join(" ") || message.data }
  }
  return post.call(this, message, ...rest)
}
