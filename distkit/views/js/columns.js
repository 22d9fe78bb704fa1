// Arrays that arrive as one buffer; the format is in timeline/bars.py.

const TYPES = { f8: Float64Array, i4: Int32Array, f4: Float32Array };

// bytes: a DataView, or base64 for text transports.
export function unpack({ parts, bytes: told }) {
  const bytes = typeof told === "string"
    ? new DataView(Uint8Array.from(atob(told), (letter) => letter.charCodeAt(0)).buffer) : told;
  let at = bytes.byteOffset;
  return Object.fromEntries(parts.map(([name, type, length]) => {
    const Type = TYPES[type];
    const end = at + length * Type.BYTES_PER_ELEMENT;
    const array = new Type(bytes.buffer.slice(at, end));
    at = end;
    return [name, array];
  }));
}

// Values of tensors by bar: [before, after], each as in a single bar.
export function tensors({ valued, numbers }) {
  const found = new Map();
  for (let i = 0, at = 0; i < valued.length; i += 5) {
    const [bar, when, size, sampled, count] = valued.subarray(i, i + 5);
    const [norm, min, max, ...values] = Array.from(numbers.subarray(at, at + 3 + count), word);
    if (!found.has(bar)) found.set(bar, [null, null]);
    found.get(bar)[when] = { values, norm, min, max, size, sampled: Boolean(sampled) };
    at += 3 + count;
  }
  return found;
}

const word = (x) => (Number.isFinite(x) ? x : Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf");
