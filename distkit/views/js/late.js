// A widget whose script takes longer to load than anywidget waits, 2 seconds: from then on anywidget
// drops all that the kernel sends to it. Such a widget takes its messages itself.

export function initialize({ model }) {
  const raw = model.set({}); // what anywidget hands over is a part of it
  raw?._handle_comm_msg?.({ content: { data: {} } }).catch(() => listen(raw));
}

function listen(raw) {
  const { _handle_comm_msg: handle } = Object.getPrototypeOf(Object.getPrototypeOf(raw));
  raw.comm?.on_msg((message) => handle.call(raw, message));
  raw.comm?.send({ method: "request_state" }); // messages are lost
}
