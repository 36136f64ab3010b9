//! Converter from ViVQA-X (Vietnamese visual questions with explanations over COCO images) to JSON lines for training.
//!
//! Source: `ViVQA-X_{train,val,test}.json` of duongtruongbinh/ViVQA-X. One line per item: `{id, image, conversations: [human,
//! gpt], explanations, question, question_id, question_type, answer_type}`. The human turn is the instruction below with the
//! question. The gpt turn is `<answer>…</answer><explain>…</explain>` with the first explanation. The types are for tables by
//! category. The image is a plain file name, which is looked up in the folder of its split when rows are read.
//!
//! Differences from the original converter: every explanation is kept (column `explanations`), because a reward that compares
//! with references needs all of them, and dropped items are reported. As in the original, ids are 1-based positions in the source
//! list, so a dropped item leaves a gap.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::DataError;
use crate::output::{Output, check_is_other};
use crate::rows::RowFile;

/// Result of [`convert_vivqa_x`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversion {
    /// Number of lines written.
    pub num_written: u64,
    /// Dropped items: 1-based position in the source and the reason.
    pub dropped: Vec<(u64, String)>,
}

/// Wording that models were trained with on this dataset, including the trailing space of its first line.
const INSTRUCTION: &str = "<image> You are a Visual Question Answering system. Your task is to answer questions based on the content of the provided image. \n\
You must respond in Vietnamese and your response **must** include all the tags <think> </think>, <answer> </answer>, <explain> </explain>.\n\
\n\
Follow these steps precisely:\n\
1. In the <think> tag, provide a step-by-step reasoning process.\n\
2. In the <answer> tag, give one word or one short phrase.\n\
3. In the <explain> tag, provide one brief sentence that justifies your answer.\n\
\n\
Now, answer this question based on the image:\n\
Question: ";

#[derive(Deserialize)]
struct Item {
    question: String,
    image_name: String,
    answer: String,
    explanation: Vec<String>,
    question_id: Option<Value>,
    question_type: Option<Value>,
    answer_type: Option<Value>,
}

/// Converts one split. The output is either complete or absent.
///
/// # Errors
/// Returns an error if the input is not a list of items or has no usable item, or if the output cannot be written or is the
/// input.
pub fn convert_vivqa_x(input: &Path, output: &Path) -> Result<Conversion, DataError> {
    check_is_other(input, output)?;
    let items = RowFile::open(input)?;
    let mut conversion = Conversion { num_written: 0, dropped: Vec::new() };
    let mut out = Output::create(output)?;
    for position in 0..items.len() {
        match line(&items, position) {
            Ok(line) => {
                out.line(&line)?;
                conversion.num_written += 1;
            }
            Err(reason) => conversion.dropped.push((position + 1, reason)),
        }
    }
    if conversion.num_written == 0 {
        let reason = conversion
            .dropped
            .first()
            .map_or_else(String::new, |(_, reason)| format!(" (the first item: {reason})"));
        return Err(DataError::Empty { files: format!("{}{reason}", input.display()) });
    }
    out.finish()?;
    Ok(conversion)
}

fn line(items: &RowFile, position: u64) -> Result<Value, String> {
    let bytes = items.read(position).map_err(|error| omnigrpo_guard::told(&error))?;
    let item: Item = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    let fields = [("question", &item.question), ("image_name", &item.image_name), ("answer", &item.answer)];
    if let Some((name, _)) = fields.iter().find(|(_, text)| text.trim().is_empty()) {
        return Err(format!("`{name}` is empty"));
    }
    let explanations: Vec<_> = item.explanation.iter().filter(|text| !text.trim().is_empty()).collect();
    let Some(first) = explanations.first() else { return Err("`explanation` is empty".to_owned()) };
    Ok(json!({
        "id": position + 1,
        "image": item.image_name,
        "conversations": [
            {"from": "human", "value": format!("{INSTRUCTION}{}", item.question)},
            {"from": "gpt", "value": format!("<answer>{}</answer><explain>{first}</explain>", item.answer)},
        ],
        "question": item.question,
        "explanations": explanations,
        "question_id": item.question_id,
        "question_type": item.question_type,
        "answer_type": item.answer_type,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dataset, DatasetSpec, MediumSource, Part, ReadOptions, Roots};

    /// Returns items with the keys of the published files.
    fn source() -> Value {
        let item = |question: &str, split: &str, explanation: Value| {
            json!({
                "question": question, "image_id": "262284", "image_name": format!("COCO_{split}_000000262284.jpg"),
                "explanation": explanation, "answer": "có", "question_id": "262284001",
                "question_type": "is this", "answer_type": "yes/no",
            })
        };
        let mut no_answer = item("thiếu?", "val2014", json!(["x"]));
        no_answer.as_object_mut().unwrap().remove("answer");
        json!([
            item("đây là ban ngày?", "train2014", json!(["trời sáng", "có nắng", "thấy mặt trời"])),
            no_answer,
            item("trống?", "val2014", json!([])),
            item("con gì?", "val2014", json!(["một lý do"])),
        ])
    }

    #[test]
    fn real_schema_becomes_rows_that_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) =
            (folder.path().join("ViVQA-X_train.json"), folder.path().join("out/ViVQA-X_train_grpo.jsonl"));
        std::fs::write(&input, serde_json::to_string_pretty(&source()).unwrap()).unwrap();
        let conversion = convert_vivqa_x(&input, &output).unwrap();
        assert_eq!(conversion.num_written, 2);
        let dropped: Vec<_> = conversion.dropped.iter().map(|(id, _)| *id).collect();
        assert_eq!(dropped, [2, 3]);
        assert!(conversion.dropped[0].1.contains("missing field `answer`"), "{:?}", conversion.dropped);

        let images = folder.path().join("coco");
        for split in ["train2014", "val2014"] {
            std::fs::create_dir_all(images.join(split)).unwrap();
            std::fs::write(images.join(split).join(format!("COCO_{split}_000000262284.jpg")), "x").unwrap();
        }
        let spec = DatasetSpec::file(&output).with_roots(Roots::all(&images));
        let dataset = Dataset::open(&[spec], &ReadOptions::default()).unwrap();
        let (first, last) = (dataset.get(0).unwrap(), dataset.get(1).unwrap());
        assert_eq!((first.id.as_str(), last.id.as_str()), ("1", "4"));
        assert_eq!(first.solution.as_deref(), Some("<answer>có</answer><explain>trời sáng</explain>"));
        assert_eq!(first.columns["explanations"], json!(["trời sáng", "có nắng", "thấy mặt trời"]));
        assert_eq!(
            (&first.columns["question_type"], &first.columns["answer_type"]),
            (&json!("is this"), &json!("yes/no"))
        );
        let image = images.canonicalize().unwrap().join("val2014/COCO_val2014_000000262284.jpg");
        assert_eq!(last.media[0].source, MediumSource::Path(image));
        let Part::Text(prompt) = &first.turns[0].parts[1] else { panic!() };
        assert!(prompt.starts_with(" You are a Visual Question Answering system."));
        assert!(prompt.contains("provided image. \nYou must respond in Vietnamese"));
        assert!(prompt.ends_with("based on the image:\nQuestion: đây là ban ngày?"));
    }

    #[test]
    fn nothing_usable_writes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("in.json"), folder.path().join("out.jsonl"));
        std::fs::write(&input, "[{\"question\": \"q\"}]").unwrap();
        let message = convert_vivqa_x(&input, &output).unwrap_err().to_string();
        assert!(message.contains("missing field") && message.contains("in.json"), "{message}");
        let left: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["in.json"]);
    }
}
