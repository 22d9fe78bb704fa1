// Commands to the kernel: each has an id, is acknowledged at once, and executed later.

const SILENCE = 4000; // milliseconds without an answer: say so
const SETTLED = 300; // milliseconds after which a lost kernel's channels are closed

let views = 0; // several views of one model each have ids of their own

export class Talk {
  // onmiss("silent"): the kernel does not answer; "gone": nothing can be sent; "": it is there.
  constructor(model, onmiss) {
    Object.assign(this, { model, onmiss, unheard: new Map(), waiting: new Map(), count: 0 });
    this.view = `${Date.now().toString(36)}.${views++}`;
    this.listen = (message) => this.#heard(message);
    this.ask = () => {
      clearTimeout(this.asking);
      this.asking = setTimeout(() => this.send({ do: "hello" }), SETTLED);
    };
    model.on("msg:custom", this.listen);
    this.closed = () => onmiss("gone");
    model.on("comm:close", this.closed);
    model.on("comm_live_update", this.ask); // the kernel was restarted, or the page connected again
  }

  send(command, done = () => {}) {
    const id = `${this.view}.${this.count++}`;
    try {
      this.model.send({ ...command, id });
    } catch {
      return this.onmiss("gone");
    }
    this.waiting.set(id, done);
    // an idle kernel would have answered
    const idle = () => this.model.widget_manager?.kernel?.status === "idle";
    this.unheard.set(id, setTimeout(() => this.onmiss(idle() ? "gone" : "silent"), SILENCE));
  }

  #heard({ heard, did }) {
    if (this.unheard.has(heard)) {
      clearTimeout(this.unheard.get(heard));
      this.unheard.delete(heard);
      this.onmiss("");
    }
    const done = this.waiting.get(did);
    this.waiting.delete(did);
    done?.();
  }

  dispose() {
    for (const timer of [this.asking, ...this.unheard.values()]) clearTimeout(timer);
    this.model.off("msg:custom", this.listen);
    this.model.off("comm:close", this.closed);
    this.model.off("comm_live_update", this.ask);
  }
}
