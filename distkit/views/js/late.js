// If a widget's script takes more than 2 seconds to load, anywidget drops all messages from the
// kernel. Such a widget receives its messages directly.

export function initialize({ model }) {
  const raw = model.set({}); // anywidget passes a proxy; set() returns the model itself
  raw?._handle_comm_msg?.({ content: { data: {} } }).catch(() => listen(raw));
}

function listen(raw) {
  const { _handle_comm_msg: handle } = Object.getPrototypeOf(Object.getPrototypeOf(raw));
  raw.comm?.on_msg((message) => handle.call(raw, message));
  raw.comm?.send({ method: "request_state" }); // messages have been lost
}
