//! Writing a checkpoint directory in the published layout.

use std::path::Path;

use serde_json::Value;

use crate::error::{ModelError, Result};
use crate::model::Model;

/// Files beside the weights that belong to a checkpoint.
const COMPANIONS: [&str; 15] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
    "configuration.json",
];

impl Model {
    /// Writes weights, `config.json`, tokenizer and processor files into `dir`, which is created. Everything except the
    /// weights is copied from the directory the model came from; `tie_word_embeddings` is set to what the weights are,
    /// since older readers trust it.
    ///
    /// # Errors
    /// A directory that cannot be written.
    pub fn save_pretrained(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(ModelError::io(dir))?;
        let real = |path: &Path| std::fs::canonicalize(path).map_err(ModelError::io(path));
        if real(dir)? == real(self.dir())? {
            return Err(ModelError::Checkpoint {
                dir: dir.to_path_buf(),
                what: "a model cannot be saved over the one it was loaded from; choose another directory"
                    .into(),
            });
        }
        for name in COMPANIONS {
            let from = self.dir().join(name);
            if from.is_file() {
                let to = dir.join(name);
                std::fs::copy(&from, &to).map_err(ModelError::io(to))?;
            }
        }
        let path = self.dir().join("config.json");
        let text = std::fs::read_to_string(&path).map_err(ModelError::io(&path))?;
        let mut config: Value = serde_json::from_str(&text)
            .map_err(|e| ModelError::Config { path: path.clone(), what: format!("not valid JSON: {e}") })?;
        let tied = Value::Bool(self.decoder().tied());
        if let Some(root) = config.as_object_mut() {
            if let Some(text) = root.get_mut("text_config").and_then(Value::as_object_mut)
                && text.contains_key("tie_word_embeddings")
            {
                text.insert("tie_word_embeddings".into(), tied.clone());
            }
            root.insert("tie_word_embeddings".into(), tied);
        }
        let to = dir.join("config.json");
        std::fs::write(&to, format!("{config:#}\n")).map_err(ModelError::io(to))?;
        self.save_weights(dir)
    }

    /// Overwrites the weights with those of a directory that [`Self::save_pretrained`] wrote.
    ///
    /// # Errors
    /// Missing tensors or other shapes.
    pub fn load_weights(&self, dir: &Path) -> Result<()> {
        let files = crate::WeightFiles::open(dir, |key| self.family().published_name(key))?;
        for param in self.params() {
            let value = files.read(param.name(), crate::WeightDtype::Float32)?.map_err(|what| {
                ModelError::Checkpoint { dir: dir.to_path_buf(), what: what.trim().to_owned() }
            })?;
            if value.dims() != param.value().dims() {
                return Err(ModelError::Checkpoint {
                    dir: dir.to_path_buf(),
                    what: format!(
                        "tensor {} has shape {:?}, this model's has {:?}",
                        param.name(),
                        value.dims(),
                        param.value().dims()
                    ),
                });
            }
            omnigrpo_ops::with_f32(&value.flatten_all()?, |data| param.store(data))??;
        }
        Ok(())
    }
}
