//! Prompt formats of InternVL.
//!
//! Source: `conversation.py` of `internvl_chat` for the named ones, the published processors for hf.
//!
//! A medium is followed by a line break in the format the models were trained with. Rows that say `<image>\n` bring it; where
//! media stand at the start of a turn without one, it is added, as `InternVLChatModel.chat` does.

/// Name in `config.json`, default system text, end of a turn.
pub(super) const NAMES: [(&str, &str, &str); 2] = [
    (
        "internvl2_5",
        "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。",
        "<|im_end|>\\n",
    ),
    (
        "Hermes-2",
        "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。",
        "<|im_end|>",
    ),
];

const ORIGINAL: &str = include_str!("original.jinja");

/// For a checkpoint of the hf layout that brings no template.
pub(super) const HF: &str = include_str!("hf.jinja");

/// The template of this name, for the placeholders `<image>` and `<video>`.
pub(super) fn original(name: &str) -> Option<String> {
    let (_, system, end) = NAMES.iter().find(|(known, ..)| *known == name)?;
    Some(ORIGINAL.replace("@SYSTEM@", system).replace("@END@", end).replace("@IMAGE@", "<image>"))
}

/// Returns the same prompt for a processor of the hf layout, which looks for another image placeholder.
pub(super) fn original_for_hf(name: &str) -> Option<String> {
    let (_, system, end) = NAMES.iter().find(|(known, ..)| *known == name)?;
    Some(ORIGINAL.replace("@SYSTEM@", system).replace("@END@", end).replace("@IMAGE@", super::CONTEXT))
}

/// The name of a template that [`original_for_hf`] wrote.
pub(super) fn name_of(source: &str) -> Option<&'static str> {
    NAMES.iter().map(|(name, ..)| *name).find(|name| original_for_hf(name).as_deref() == Some(source))
}
