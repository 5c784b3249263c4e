// The theme: as the system has it, or as it was chosen here. Runs before anything is drawn.
(function () {
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  const WORDS = { auto: "automatic", light: "light", dark: "dark" };
  const stored = localStorage.getItem("sessionkv.theme");
  let theme = stored in NEXT ? stored : "auto";

  function apply() {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${WORDS[theme]}`;
  }

  apply();
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      theme = NEXT[theme];
      localStorage.setItem("sessionkv.theme", theme);
      apply();
    });
  });
})();
