// A plotly widget whose script is carried to the page once, by another widget, however many charts there are.
function load(model) {
  globalThis.rlNotebookFigures ??= carried(model);
  return globalThis.rlNotebookFigures;
}

async function carried(model) {
  const carrier = await model.widget_manager.get_model(model.get("carrier").slice("IPY_MODEL_".length));
  const url = URL.createObjectURL(new Blob([carrier.get("script")], { type: "text/javascript" }));
  try {
    return (await import(url)).default;
  } finally {
    URL.revokeObjectURL(url);
  }
}

export default () => {
  let figure;
  const ready = (model) =>
    (figure ??= load(model).then((make) => {
      const made = make();
      made.initialize({ model });
      return made;
    }));
  return {
    initialize({ model }) {
      ready(model); // not awaited: reading plotly may take longer than a model may take to begin
    },
    async render({ model, el }) {
      const made = await ready(model);
      const gone = made.render({ model, el });
      model.set("listening", true);
      model.save_changes();
      return gone;
    },
  };
};
