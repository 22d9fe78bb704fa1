// Commands to the kernel. Each has an id, is acknowledged immediately, and is executed later.

const TIMEOUT = 4000; // time after which a kernel without a reply is reported [ms]
const CLOSE_DELAY = 300; // time within which the channels of a lost kernel are closed [ms]

let views = 0; // distinguishes the ids of several views of one model

export class Connection {
  // onStatus("silent"): the kernel does not reply; "gone": it cannot be reached; "": it replies.
  constructor(model, onStatus) {
    Object.assign(this, { model, onStatus, unacknowledged: new Map(), callbacks: new Map(), count: 0 });
    this.view = `${Date.now().toString(36)}.${views++}`;
    this.listen = (message) => this.#onMessage(message);
    this.ask = () => {
      clearTimeout(this.asking);
      this.asking = setTimeout(() => this.send({ do: "hello" }), CLOSE_DELAY);
    };
    model.on("msg:custom", this.listen);
    this.closed = () => onStatus("gone");
    model.on("comm:close", this.closed);
    model.on("comm_live_update", this.ask); // the kernel was restarted, or the page reconnected
  }

  send(command, done = () => {}) {
    const id = `${this.view}.${this.count++}`;
    try {
      this.model.send({ ...command, id });
    } catch {
      return this.onStatus("gone");
    }
    this.callbacks.set(id, done);
    // an idle kernel would have replied
    const idle = () => this.model.widget_manager?.kernel?.status === "idle";
    this.unacknowledged.set(id, setTimeout(() => this.onStatus(idle() ? "gone" : "silent"), TIMEOUT));
  }

  #onMessage({ received, done }) {
    if (this.unacknowledged.has(received)) {
      clearTimeout(this.unacknowledged.get(received));
      this.unacknowledged.delete(received);
      this.onStatus("");
    }
    const callback = this.callbacks.get(done);
    this.callbacks.delete(done);
    callback?.();
  }

  dispose() {
    for (const timer of [this.asking, ...this.unacknowledged.values()]) clearTimeout(timer);
    this.model.off("msg:custom", this.listen);
    this.model.off("comm:close", this.closed);
    this.model.off("comm_live_update", this.ask);
  }
}
