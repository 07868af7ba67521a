(() => {
  const main = document.querySelector("main"), keys = document.getElementById("keys");
  if (main.dataset.state === "wait") {
    const look = async () => {
      try {
        const answer = await fetch("/state");
        const ready = !answer.ok || (await answer.text()) !== "wait";
        // Reloading would discard typed text.
        if (ready && !document.querySelector("textarea")?.value) return location.reload();
      } catch {
        document.querySelector("[role=status]").textContent = "prefed collect has stopped. Start it again.";
        return;
      }
      setTimeout(look, 300);
    };
    setTimeout(look, 300);
  }
  if (keys) {
    keys.parentElement.hidden = false;
    keys.checked = localStorage.getItem("keys") !== "off";
    keys.addEventListener("change", () => localStorage.setItem("keys", keys.checked ? "on" : "off"));
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.isComposing) return;
    if (keys && !keys.checked || event.target.closest("input:not([type=radio],[type=checkbox]), textarea")) return;
    const levels = [...document.querySelectorAll("[name=strength]")];
    const button = [...document.querySelectorAll("[data-key]")].find((each) => each.dataset.key === event.key);
    if (button) {
      event.preventDefault();
      button.click();
    } else if (event.key === "s" && levels.length) {
      const next = levels[(levels.findIndex((each) => each.checked) + 1) % levels.length];
      next.checked = true;
      next.focus();
    }
  });
})();
