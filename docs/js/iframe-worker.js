// Search in pages that are opened from a folder: browsers refuse workers there, so a hidden frame does a worker's work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.waiting = [];
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => this.load(new URL(source, url).href)), Promise.resolve());
      this.load(url).then(() => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      });
    }

    load(source) {
      return new Promise((loaded, failed) => {
        const script = this.inside.document.createElement("script");
        script.src = source;
        script.onload = loaded;
        script.onerror = failed;
        this.inside.document.documentElement.append(script);
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
