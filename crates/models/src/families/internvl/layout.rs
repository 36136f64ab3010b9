//! The two layouts of InternVL: names of tensors, keys of the configuration and defaults.

use super::CONTEXT;

/// Layout of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `InternVLChatModel`: `vision_model`, `mlp1`, one projection for query, key and value.
    Original,
    /// `InternVLForConditionalGeneration`: `vision_tower`, `multi_modal_projector`, three projections.
    Hf,
}

/// Differences between layouts, with the defaults of the layout's own class.
pub(super) struct Rules {
    /// Name in [`Model::save_as`](crate::Model::save_as).
    pub name: &'static str,
    /// Section of the language model.
    pub text: &'static str,
    /// Default of `tie_word_embeddings`.
    pub tied: bool,
    /// Default width, number of blocks, number of heads and feed-forward width of the tower.
    pub sizes: [usize; 4],
    /// Default side of a picture of the tower, px.
    pub image_px: usize,
    /// Default norm of the tower.
    pub norm: &'static str,
    /// Key that selects norms of queries and keys, with its default.
    pub qk_norm: (&'static str, bool),
    /// Epsilon of the norms of queries and keys; `None` for `layer_norm_eps`.
    pub qk_norm_eps: Option<f32>,
    /// Key of the biases of query, key and value projections.
    pub qkv_bias: &'static str,
    /// Text that a template writes for an image.
    pub marker: &'static str,
    /// Whether files may use the names of modules of `transformers`, and adapters are saved under these.
    pub as_modules: bool,
    /// Whether the tiling is in the processor file.
    pub tiles_in_processor: bool,
}

static RULES: [Rules; 2] = [
    Rules {
        name: "original",
        text: "llm_config",
        tied: false,
        sizes: [3200, 48, 25, 12800],
        image_px: 224,
        norm: "rms_norm",
        qk_norm: ("qk_normalization", true),
        qk_norm_eps: None,
        qkv_bias: "qkv_bias",
        marker: "<image>",
        as_modules: false,
        tiles_in_processor: false,
    },
    Rules {
        name: "hf",
        text: "text_config",
        tied: true,
        sizes: [1024, 24, 16, 4096],
        image_px: 448,
        norm: "layer_norm",
        qk_norm: ("use_qk_norm", false),
        // The class of this layout does not pass its epsilon to these two norms.
        qk_norm_eps: Some(1e-6),
        qkv_bias: "attention_bias",
        marker: CONTEXT,
        as_modules: true,
        tiles_in_processor: true,
    },
];

/// Names of layers and tensors in the original layout and in hf, without `.weight` and `.bias`; `#` is the number of a block. A
/// tensor with several rows consists of the tensors of these rows, in this order.
const NAMES: [[&str; 2]; 18] = [
    ["vision_model.embeddings.class_embedding", "vision_tower.embeddings.cls_token"],
    ["vision_model.embeddings.position_embedding", "vision_tower.embeddings.position_embeddings"],
    ["vision_model.embeddings.patch_embedding", "vision_tower.embeddings.patch_embeddings.projection"],
    ["vision_model.encoder.layers.#.norm1", "vision_tower.encoder.layer.#.layernorm_before"],
    ["vision_model.encoder.layers.#.norm2", "vision_tower.encoder.layer.#.layernorm_after"],
    ["vision_model.encoder.layers.#.attn.qkv", "vision_tower.encoder.layer.#.attention.q_proj"],
    ["vision_model.encoder.layers.#.attn.qkv", "vision_tower.encoder.layer.#.attention.k_proj"],
    ["vision_model.encoder.layers.#.attn.qkv", "vision_tower.encoder.layer.#.attention.v_proj"],
    ["vision_model.encoder.layers.#.attn.q_norm", "vision_tower.encoder.layer.#.attention.q_norm"],
    ["vision_model.encoder.layers.#.attn.k_norm", "vision_tower.encoder.layer.#.attention.k_norm"],
    ["vision_model.encoder.layers.#.attn.proj", "vision_tower.encoder.layer.#.attention.projection_layer"],
    ["vision_model.encoder.layers.#.ls1", "vision_tower.encoder.layer.#.lambda_1"],
    ["vision_model.encoder.layers.#.ls2", "vision_tower.encoder.layer.#.lambda_2"],
    ["vision_model.encoder.layers.#.mlp.fc1", "vision_tower.encoder.layer.#.mlp.fc1"],
    ["vision_model.encoder.layers.#.mlp.fc2", "vision_tower.encoder.layer.#.mlp.fc2"],
    ["mlp1.0", "multi_modal_projector.layer_norm"],
    ["mlp1.1", "multi_modal_projector.linear_1"],
    ["mlp1.3", "multi_modal_projector.linear_2"],
];

impl Layout {
    pub(super) fn rules(self) -> &'static Rules {
        &RULES[self as usize]
    }

    /// Returns the layout's name in [`Model::save_as`](crate::Model::save_as).
    pub fn name(self) -> &'static str {
        self.rules().name
    }

    /// Returns the layout of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Original, Self::Hf].into_iter().find(|layout| layout.name() == name)
    }

    /// Returns the names in layout `to` of a layer or tensor of this layout: several if it is split there, none if it is unknown.
    pub(super) fn renamed(self, name: &str, to: Self) -> Vec<String> {
        if self == to || name.starts_with("language_model.") {
            return vec![name.to_owned()];
        }
        let each = NAMES.iter().filter_map(|row| {
            let (start, part) = row[self as usize].split_once('#').unwrap_or((row[self as usize], ""));
            let rest = name.strip_prefix(start)?;
            let block = if part.is_empty() { "" } else { rest.split('.').next()? };
            let end = rest.strip_prefix(block)?.strip_prefix(part)?;
            ["", ".weight", ".bias"].contains(&end).then(|| row[to as usize].replace('#', block) + end)
        });
        each.collect()
    }

    /// Returns the names in this layout of a layer or tensor of the original layout.
    pub(super) fn named<const N: usize>(self, original: [&str; N]) -> [String; N] {
        original.map(|name| {
            Self::Original.renamed(name, self).into_iter().next().unwrap_or_else(|| name.to_owned())
        })
    }
}
