// Hides the rows of the page's first table that lack one of the typed words. Without this script, the table is whole.
const box = document.getElementById("filter");
if (box) {
  const rows = [...document.querySelector("article table").tBodies[0].rows];
  box.hidden = false;
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
}
