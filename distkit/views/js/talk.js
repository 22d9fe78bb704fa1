// Commands to the kernel. Each has an id, is acknowledged immediately, and executed later.

const SILENCE = 4000; // time without a reply after which it is reported [ms]
const SETTLED = 300; // time after which a lost kernel's channels are closed [ms]

let views = 0; // makes the ids of several views of one model unique

export class Talk {
  // onmiss("silent"): the kernel does not reply; "gone": nothing can be sent; "": it replies.
  constructor(model, onmiss) {
    Object.assign(this, { model, onmiss, unacknowledged: new Map(), waiting: new Map(), count: 0 });
    this.view = `${Date.now().toString(36)}.${views++}`;
    this.listen = (message) => this.#onMessage(message);
    this.ask = () => {
      clearTimeout(this.asking);
      this.asking = setTimeout(() => this.send({ do: "hello" }), SETTLED);
    };
    model.on("msg:custom", this.listen);
    this.closed = () => onmiss("gone");
    model.on("comm:close", this.closed);
    model.on("comm_live_update", this.ask); // the kernel was restarted, or the page reconnected
  }

  send(command, done = () => {}) {
    const id = `${this.view}.${this.count++}`;
    try {
      this.model.send({ ...command, id });
    } catch {
      return this.onmiss("gone");
    }
    this.waiting.set(id, done);
    // an idle kernel would have replied
    const idle = () => this.model.widget_manager?.kernel?.status === "idle";
    this.unacknowledged.set(id, setTimeout(() => this.onmiss(idle() ? "gone" : "silent"), SILENCE));
  }

  #onMessage({ heard, did }) {
    if (this.unacknowledged.has(heard)) {
      clearTimeout(this.unacknowledged.get(heard));
      this.unacknowledged.delete(heard);
      this.onmiss("");
    }
    const done = this.waiting.get(did);
    this.waiting.delete(did);
    done?.();
  }

  dispose() {
    for (const timer of [this.asking, ...this.unacknowledged.values()]) clearTimeout(timer);
    this.model.off("msg:custom", this.listen);
    this.model.off("comm:close", this.closed);
    this.model.off("comm_live_update", this.ask);
  }
}
