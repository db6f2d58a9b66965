"""The pages of a folder in headless Chromium: what is wider than the window, and what is loaded from elsewhere."""

import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

WALK = """<!doctype html><title>walk</title><body><script>
const queue = PAGES, onPhones = PHONES, seen = {}, cut = {}, sleep = (ms) => new Promise((done) => setTimeout(done, ms));
async function open(frame, page) {
  await new Promise((done) => { frame.onload = done; frame.src = "/" + page; });
  await sleep(60);
  return frame.contentDocument;
}
async function walk() {
  const frame = document.createElement("iframe");
  frame.style.cssText = "width:1280px;height:900px;border:0";
  document.body.append(frame);
  while (queue.length) {
    const page = queue.shift(), doc = await open(frame, page), root = doc.documentElement;
    const boxes = [...doc.querySelectorAll("article *")].filter((box) =>
      box.scrollWidth > box.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(box).overflowX));
    const loaded = frame.contentWindow.performance.getEntriesByType("resource").map((entry) => entry.name);
    seen[page] = {
      title: doc.title,
      too_wide: root.scrollWidth > root.clientWidth ? root.scrollWidth : 0,
      boxes: boxes.map((box) => box.textContent.trim().slice(0, 120)),
      elsewhere: loaded.filter((name) => !name.startsWith(location.origin)),
    };
  }
}
async function walkOnPhones() {
  const frame = document.createElement("iframe");
  frame.style.cssText = "width:400px;height:900px;border:0";
  document.body.append(frame);
  for (const page of onPhones) {
    const doc = await open(frame, page);
    cut[page] = [...doc.querySelectorAll("article pre > code")].filter((code) => {
      const lines = code.textContent.trimEnd().split("\\n").length;
      return code.scrollHeight > (lines + 3) * parseFloat(getComputedStyle(code).lineHeight);
    }).map((code) => code.textContent.trim().slice(0, 120));
  }
}
async function search(words) {
  const frame = document.createElement("iframe");
  frame.style.cssText = "width:1280px;height:900px";
  document.body.append(frame);
  const doc = await open(frame, "index.html?q=" + encodeURIComponent(words));
  for (let i = 0; i < 100; i++) {
    const links = [...doc.querySelectorAll(".md-search-result__link")].map((link) => link.getAttribute("href"));
    if (links.length) return links;
    await sleep(100);
  }
  return [];
}
(async () => {
  await Promise.all([walk(), walk(), walk(), walkOnPhones()]);
  const found = {};
  for (const words of SEARCHES) found[words] = await search(words);
  await fetch("/done", { method: "POST", body: JSON.stringify({ pages: seen, cut, found }) });
})();
</script>"""


def browser() -> str:
    """The path of a browser. The tests of the site cannot run without one."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"These tests need one of {', '.join(BROWSERS)}. Install it: apt-get install chromium"
    return found


def walked(
    folder: Path,
    pages: Sequence[str],
    searches: Sequence[str] = (),
    *,
    phones: Sequence[str] = (),
    seconds: float = 240.0,
) -> dict[str, Any]:
    """Open pages in windows of 1,280 px, and `phones` at 400 px, without a network, and search the site.

    Returns:
        `pages`: for each page its title, its width if it is too wide, the texts of boxes in it that scroll sideways, and what
        it loads from other hosts. `cut`: for each page on a phone the blocks of code with broken lines.
        `found`: for each search the links of its results.
    """
    script = WALK.replace("PAGES", json.dumps(list(pages))).replace("SEARCHES", json.dumps(list(searches)))
    script = script.replace("PHONES", json.dumps(list(phones)))
    # Chromium's children may still write into the profile after their parent has ended.
    profiles = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with served(folder, script) as (address, answer), profiles as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--no-first-run"]
        offline = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        command = [browser(), *options, offline, f"--user-data-dir={profile}", f"{address}/walk"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                assert answer.ready.wait(seconds), f"Chromium did not finish within {seconds:g} s"
            finally:
                process.terminate()
                process.wait()
        return json.loads(answer.text)


class Answer:
    """What the page in the browser sends at the end."""

    def __init__(self) -> None:
        self.ready, self.text = threading.Event(), ""


@contextmanager
def served(folder: Path, script: str) -> Iterator[tuple[str, Answer]]:
    """A server of a folder on this machine, with the page that walks through the others."""
    answer = Answer()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/walk":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(script.encode())
            return None

        def do_POST(self) -> None:
            answer.text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self.send_response(204)
            self.end_headers()
            answer.ready.set()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", answer
        finally:
            server.shutdown()
            thread.join()
