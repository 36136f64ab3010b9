//! Writes a checkpoint directory in the published layout.

use std::path::{Path, PathBuf};

use omnigrpo_guard::inside;

use omnigrpo_text::{ChatTemplate, TemplateOrigin};
use serde_json::Value;

use crate::error::{ModelError, Result};
use crate::families::Converted;
use crate::model::Model;
use crate::weights::save_weights;

/// Files of a checkpoint besides the weights.
pub const COMPANIONS: [&str; 17] = [
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
    "sentencepiece.bpe.model",
    // The voices of Qwen2.5-Omni's talker, a pickle file that is copied and never read.
    VOICES,
];
/// Voices of Qwen2.5-Omni.
const VOICES: &str = "spk_dict.pt";
/// Model card, from which the licence is copied.
const CARD: &str = "README.md";
/// Folder of chat templates other than the default one.
const MORE_TEMPLATES: &str = "additional_chat_templates";

/// Largest accepted size, in bytes, of a file other than the weights. A tokenizer of a large vocabulary has 35 MB.
const MAX_COMPANION_BYTES: u64 = 256 << 20;

/// Lists the files, other than the weights, that are copied with a model, as paths relative to the checkpoint directory. They are
/// those of [`COMPANIONS`], and the Python code and additional templates that some checkpoints contain.
///
/// # Errors
/// Returns an error if a folder cannot be read, a link points outside the directory or a path is not a regular file.
pub(crate) fn companions(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut names: Vec<PathBuf> = COMPANIONS.into_iter().map(PathBuf::from).collect();
    names.extend(files_ending(dir, Path::new(""), "py")?);
    names.extend(files_ending(dir, Path::new(MORE_TEMPLATES), "jinja")?);
    let there = names.into_iter().filter_map(|name| match is_there(dir, &name) {
        Ok(there) => there.then_some(Ok(name)),
        Err(error) => Some(Err(error)),
    });
    there.collect()
}

/// Checks that no file besides the weights is a link to a place outside the directory. The check runs when a checkpoint is
/// opened, so that writing the trained model does not fail.
pub(crate) fn check_links(dir: &Path) -> Result<()> {
    companions(dir)?;
    is_there(dir, Path::new(CARD)).map(drop)
}

fn is_there(dir: &Path, name: &Path) -> Result<bool> {
    if dir.join(name).is_dir() {
        return Ok(false);
    }
    match inside::open(dir, name) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(ModelError::io(dir.join(name))(error)),
    }
}

/// Reads a file other than the weights, if it exists.
pub(crate) fn companion(dir: &Path, name: &Path) -> Result<Option<Vec<u8>>> {
    if !is_there(dir, name)? {
        return Ok(None);
    }
    let content = inside::read(dir, name, MAX_COMPANION_BYTES);
    content.map(Some).map_err(ModelError::io(dir.join(name)))
}

/// Returns the sorted names of the files in `folder` of `dir` with this extension; none if the folder does not exist.
fn files_ending(dir: &Path, folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let path = dir.join(folder);
    let entries = match std::fs::read_dir(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(ModelError::io(&path))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = PathBuf::from(entry.map_err(ModelError::io(&path))?.file_name());
        if name.extension().is_some_and(|extension| extension == ending) {
            names.push(folder.join(name));
        }
    }
    names.sort();
    Ok(names)
}

impl Model {
    /// Writes weights, `config.json`, tokenizer and processor files into `dir`, which is created. Everything except the
    /// weights is copied from the directory of the loaded checkpoint. `tie_word_embeddings` is set to match the weights,
    /// since older readers trust it.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be written.
    pub fn save_pretrained(&self, dir: &Path) -> Result<()> {
        self.write(dir, None)
    }

    /// Saves as [`Self::save_pretrained`] does, in the layout of this name. Files that belong to another layout are converted.
    ///
    /// # Errors
    /// Returns an error as [`Self::save_pretrained`] does, or if the family does not have the layout or the layout cannot express
    /// this checkpoint.
    pub fn save_as(&self, dir: &Path, layout: &str) -> Result<()> {
        let format = self.family().format();
        if layout == format.layout() {
            return self.write(dir, None);
        }
        match format.convert(self.dir(), self.checkpoint().config(), self.base_params(), layout)? {
            Some(converted) => self.write(dir, Some(converted)),
            None => Err(ModelError::layout(format!(
                "layout {layout:?} is unsupported; checkpoints of {} have only the layout {:?}",
                self.family().name(),
                format.layout()
            ))),
        }
    }

    fn write(&self, dir: &Path, converted: Option<Converted>) -> Result<()> {
        std::fs::create_dir_all(dir).map_err(ModelError::io(dir))?;
        let real = |path: &Path| std::fs::canonicalize(path).map_err(ModelError::io(path));
        if real(dir)? == real(self.dir())? {
            return Err(ModelError::Checkpoint {
                dir: dir.to_path_buf(),
                what: "a model cannot be saved into the directory from which it was loaded; choose another directory"
                    .into(),
            });
        }
        let left_out = converted.as_ref().map_or(&[][..], |c| c.left_out);
        self.copy_companions(dir, left_out)?;
        let (mut config, params) = match converted {
            Some(converted) => {
                for (name, text) in converted.files {
                    let to = dir.join(name);
                    std::fs::write(&to, text).map_err(ModelError::io(to))?;
                }
                (converted.config, converted.params)
            }
            None => (Value::Object(self.checkpoint().config().object().clone()), self.saved_params()),
        };
        self.write_template(dir, left_out)?;
        let tied = Value::Bool(self.decoder().tied());
        if let Some(root) = config.as_object_mut() {
            for section in ["text_config", "llm_config"] {
                if let Some(text) = root.get_mut(section).and_then(Value::as_object_mut)
                    && text.contains_key("tie_word_embeddings")
                {
                    text.insert("tie_word_embeddings".into(), tied.clone());
                }
            }
            root.insert("tie_word_embeddings".into(), tied);
            self.family().format().saved_config(root);
        }
        let to = dir.join("config.json");
        std::fs::write(&to, format!("{config:#}\n")).map_err(ModelError::io(to))?;
        save_weights(dir, &params, self.family().format().splits_experts(), self.carried())
    }

    /// Copies tokenizer and processor files into `dir`. Also copies the Python code of checkpoints that are published with code;
    /// this program never runs it.
    pub(crate) fn copy_companions(&self, dir: &Path, left_out: &[&str]) -> Result<()> {
        for name in companions(self.dir())? {
            // The voices of Qwen2.5-Omni are a pickle file, which no other family has.
            let is_foreign = name == Path::new(VOICES) && self.family().name() != "qwen2_5_omni";
            if is_foreign || left_out.iter().any(|left_out| name == Path::new(left_out)) {
                continue;
            }
            let Some(content) = companion(self.dir(), &name)? else { continue };
            let to = dir.join(&name);
            if let Some(folder) = to.parent() {
                std::fs::create_dir_all(folder).map_err(ModelError::io(folder))?;
            }
            std::fs::write(&to, content).map_err(ModelError::io(to))?;
        }
        Ok(())
    }

    /// Writes the chat template to a file of its own, because processors of `transformers` do not read it from the tokenizer's
    /// settings. A template that cannot be used is left in place.
    pub(crate) fn write_template(&self, dir: &Path, left_out: &[&str]) -> Result<()> {
        let to = dir.join("chat_template.jinja");
        match ChatTemplate::from_dir(dir) {
            Ok(template)
                if template.origin() == TemplateOrigin::TokenizerConfig
                    && !left_out.contains(&"chat_template.jinja") =>
            {
                std::fs::write(&to, template.source()).map_err(ModelError::io(to))
            }
            _ => Ok(()),
        }
    }

    /// Overwrites the weights with those of a directory that [`Self::save_pretrained`] wrote. Weights in mapped files stay as they
    /// are, and must be equal.
    ///
    /// # Errors
    /// Returns an error if tensors are missing or have other shapes, or a weight in a mapped file has other values.
    pub fn load_weights(&self, dir: &Path) -> Result<()> {
        let files = crate::WeightFiles::open(dir, |key| self.family().format().published_name(key))?;
        let unfit = |what: String| ModelError::Checkpoint { dir: dir.to_path_buf(), what };
        for param in self.base_params() {
            if files.shape(param.name()).is_none() && self.stays_outside(param) {
                continue;
            }
            let value = files
                .read(param.name(), crate::WeightDtype::Float32)?
                .map_err(|what| unfit(what.trim().to_owned()))?;
            let (name, shape) = (param.name(), files.shape(param.name()).unwrap_or_default());
            if shape != param.shape() {
                return Err(unfit(format!(
                    "tensor {name} has shape {shape:?}; expected {:?}",
                    param.shape()
                )));
            }
            let omnigrpo_ops::Values::F32(data) = value else { continue };
            if !param.is_mapped() {
                param.store(&data)?;
            } else if param
                .read()
                .f32()
                .iter()
                .zip(&data)
                .any(|(own, stored)| own.to_bits() != stored.to_bits())
            {
                return Err(unfit(format!(
                    "tensor {name} is not trained, but differs from the one in {}",
                    self.checkpoint().dir().display()
                )));
            }
        }
        Ok(())
    }
}
