// Decodes arrays from one buffer; timeline/columns.py defines the format.

const TYPES = { f8: Float64Array, i4: Int32Array, f4: Float32Array };

// bytes: a DataView, or base64 if it was sent as text.
export function unpack({ parts, bytes: data }) {
  const bytes = typeof data === "string"
    ? new DataView(Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)).buffer) : data;
  let at = bytes.byteOffset;
  return Object.fromEntries(parts.map(([name, type, length]) => {
    const Type = TYPES[type];
    const end = at + length * Type.BYTES_PER_ELEMENT;
    const array = new Type(bytes.buffer.slice(at, end));
    at = end;
    return [name, array];
  }));
}

// Values of tensors by bar: [before, after].
export function tensors({ valued, numbers }) {
  const result = new Map();
  for (let i = 0, at = 0; i < valued.length; i += 5) {
    const [bar, when, size, sampled, count] = valued.subarray(i, i + 5);
    const [norm, min, max, ...values] = Array.from(numbers.subarray(at, at + 3 + count), parse);
    if (!result.has(bar)) result.set(bar, [null, null]);
    result.get(bar)[when] = { values, norm, min, max, size, sampled: Boolean(sampled) };
    at += 3 + count;
  }
  return result;
}

const parse = (x) => (Number.isFinite(x) ? x : Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf");
