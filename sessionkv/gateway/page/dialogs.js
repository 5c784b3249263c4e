// Questions to the user, and what went wrong.

import { byId, setText } from "./dom.js";

/**
 * Show a dialog; resolves to its fields and `action`, the value of the button, or to null.
 * `values` fill fields, `texts` the elements that are marked with `data-text`.
 */
export function openDialog(id, { values = {}, texts = {} } = {}) {
  const dialog = byId(id);
  const form = dialog.querySelector("form");
  form.reset();
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value;
  for (const node of dialog.querySelectorAll("[data-text]")) {
    node.textContent = texts[node.dataset.text] ?? "";
  }
  const before = document.activeElement;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        before?.focus();
        const action = dialog.returnValue;
        resolve(action ? { ...Object.fromEntries(new FormData(form)), action } : null);
      },
      { once: true },
    );
  });
}

/** Once, at the start. */
export function prepareDialogs() {
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close(event.submitter?.value || "ok");
    });
    dialog.querySelector("[data-cancel]").addEventListener("click", () => dialog.close(""));
  }
  byId("alert-close").addEventListener("click", () => {
    byId("alert").hidden = true;
    byId("message").focus();
  });
}

/** Tell of an error until it is dismissed or the next thing goes well. */
export function alertOf(error) {
  setText(byId("alert-text"), error?.message ?? String(error));
  byId("alert").hidden = false;
}

export function clearAlert() {
  byId("alert").hidden = true;
}
