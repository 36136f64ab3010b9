//! Prompt formats of InternVL.
//!
//! Source: `conversation.py` of `internvl_chat` for the named formats, the published processors for hf.
//!
//! In the format used in training, a line break follows a medium. Rows with `<image>\n` contain it. If media are at the start of
//! a turn without a line break, it is added, as in `InternVLChatModel.chat`.

/// Name in `config.json`, default system prompt, end of a turn.
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

/// Template for a checkpoint of the hf layout that does not contain one.
pub(super) const HF: &str = include_str!("hf.jinja");

/// Returns the template of this name, for the placeholders `<image>` and `<video>`.
pub(super) fn original(name: &str) -> Option<String> {
    let (_, system, end) = NAMES.iter().find(|(known, ..)| *known == name)?;
    Some(ORIGINAL.replace("@SYSTEM@", system).replace("@END@", end).replace("@IMAGE@", "<image>"))
}

/// Returns the same template for a processor of the hf layout, which uses another image placeholder.
pub(super) fn original_for_hf(name: &str) -> Option<String> {
    let (_, system, end) = NAMES.iter().find(|(known, ..)| *known == name)?;
    Some(ORIGINAL.replace("@SYSTEM@", system).replace("@END@", end).replace("@IMAGE@", super::CONTEXT))
}

/// Returns the name of a template that [`original_for_hf`] wrote.
pub(super) fn name_of(source: &str) -> Option<&'static str> {
    NAMES.iter().map(|(name, ..)| *name).find(|name| original_for_hf(name).as_deref() == Some(source))
}
