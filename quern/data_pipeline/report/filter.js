(function () {
  var form = document.getElementById("filter");
  if (!form) return;
  var kind = form.elements.kind, words = form.elements.words, count = document.getElementById("shown");
  var items = Array.prototype.slice.call(document.querySelectorAll("#samples .sample"));
  var texts = items.map(function (item) { return item.textContent.toLowerCase(); });
  function apply() {
    var wanted = words.value.trim().toLowerCase(), shown = 0;
    items.forEach(function (item, i) {
      var fits = (!kind.value || item.getAttribute("data-kind") === kind.value) && texts[i].indexOf(wanted) >= 0;
      item.hidden = !fits;
      shown += fits ? 1 : 0;
    });
    count.textContent = shown + " of " + items.length;
  }
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", function (event) { event.preventDefault(); });
  apply();
})();
