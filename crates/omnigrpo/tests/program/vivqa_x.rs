//! The Vietnamese pipeline on files in the published schema and a tiny InternVL: convert, check, train, evaluate.

use std::fs;

use crate::support::{Place, golden};
use serde_json::json;

/// Writes `ViVQA-X_train.json` and `_val.json` with three explanations per item, and pictures with COCO's names.
fn dataset(place: &Place) {
    for (split, questions) in [
        (
            "train",
            [
                ("hình này màu gì?", "màu đỏ"),
                ("có mấy hình?", "hai"),
                ("đây có phải hình tròn không?", "không"),
            ],
        ),
        ("val", [("màu gì?", "xanh"), ("có mấy hình vuông?", "một"), ("có hình tròn không?", "có")]),
    ] {
        fs::create_dir(place.path(&format!("{split}2014"))).unwrap();
        let items: Vec<_> = questions
            .iter()
            .enumerate()
            .map(|(i, (question, answer))| {
                let name = format!("COCO_{split}2014_{i:012}.jpg");
                // The ending is that of a JPEG, as in COCO; the content decides.
                fs::copy(golden("media/shapes.png"), place.path(&format!("{split}2014/{name}"))).unwrap();
                json!({
                    "question": question, "image_id": i.to_string(), "image_name": name, "answer": answer,
                    "question_id": format!("{i}000"), "question_type": "hình", "answer_type": "other",
                    "explanation": [
                        format!("trong ảnh là {answer}"), format!("vì ta thấy {answer}"), format!("ảnh có {answer}")
                    ],
                })
            })
            .collect();
        place.write(&format!("ViVQA-X_{split}.json"), json!(items).to_string());
    }
}

#[test]
fn converted_checked_trained_and_evaluated() {
    let place = Place::new();
    dataset(&place);
    // The prompts have about 700 tokens of the tiny byte tokenizer; the tiny checkpoint allows 512.
    fs::create_dir(place.path("model")).unwrap();
    for entry in fs::read_dir(golden("checkpoints/internvl_original")).unwrap() {
        let file = entry.unwrap().path();
        fs::copy(&file, place.path("model").join(file.file_name().unwrap())).unwrap();
    }
    let config = place.text("model/config.json");
    let longer = config.replace("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 2048");
    assert_ne!(config, longer);
    place.write("model/config.json", longer);
    for split in ["train", "val"] {
        place
            .run(&format!(
                "data convert vivqa-x --input ViVQA-X_{split}.json --output ViVQA-X_{split}_grpo.jsonl"
            ))
            .ok();
    }
    let rows = place.lines("ViVQA-X_train_grpo.jsonl");
    assert_eq!(rows.len(), 3);
    assert_eq!(rows[0]["image"], "COCO_train2014_000000000000.jpg");
    assert_eq!(
        rows[0]["conversations"][1]["value"],
        "<answer>màu đỏ</answer><explain>trong ảnh là màu đỏ</explain>"
    );
    assert_eq!(rows[0]["explanations"].as_array().unwrap().len(), 3);

    let data = "--preset vivqa-x --data_file_paths ViVQA-X_train_grpo.jsonl --image_folders train2014";
    let check = place.run(&format!("data check --model model {data}"));
    assert_eq!(check.code, Some(0), "{}{}", check.stdout, check.stderr);
    assert!(check.stdout.contains("3 rows: 3 images"), "{}{}", check.stdout, check.stderr);
    // Images are read when their row is used. Rows with missing images are found before the first step.
    fs::remove_file(place.path("train2014/COCO_train2014_000000000001.jpg")).unwrap();
    let check = place.run(&format!("data check --model model {data}")).fails(1, &["1 of 3 rows"]);
    assert!(check.stdout.contains("COCO_train2014_000000000001.jpg"), "{}", check.stdout);

    let ran = place
        .run(&format!(
            "train --model model {data} --max_skipped 50% --max_steps 2 --max_completion_length 6 --num_generations 3 \
             --gradient_accumulation_steps 1 --save_steps 1 --exp_name vi --threads 1"
        ))
        .ok();
    // The preset freezes the vision modules of its source, which for InternVL are the tower alone.
    let trained = |part: &str| -> (String, String) {
        let line = ran.stderr.lines().find(|line| line.starts_with(part)).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        (cells[2].to_owned(), cells[3].to_owned())
    };
    let (parameters, projector) = trained("projector ");
    assert_eq!((projector, trained("vision ").1), (parameters, "0".to_owned()), "{}", ran.stderr);
    let rollouts = place.lines("checkpoints/rl/vi/rollouts/step-000001.jsonl");
    assert_eq!(rollouts.len(), 3);
    for rollout in &rollouts {
        let solution = rollout["solution"].as_str().unwrap();
        assert!(solution.starts_with("<answer>") && solution.contains("</answer><explain>"), "{solution}");
        assert!(rollout["media"][0].as_str().unwrap().contains("train2014/COCO_train2014_"), "{rollout}");
        let prompt = rollout["prompt"].as_str().unwrap();
        assert!(
            prompt.contains("You must respond in Vietnamese") && prompt.contains("Question: "),
            "{prompt}"
        );
        let names: Vec<_> = rollout["rewards"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(names, ["accuracy", "cider", "format"]);
    }
    let skipped = place.lines("checkpoints/rl/vi/skipped.jsonl");
    assert!(
        skipped[0]["reason"].as_str().unwrap().contains("COCO_train2014_000000000001.jpg"),
        "{skipped:?}"
    );

    let eval = place
        .run(
            "eval --model checkpoints/rl/vi --preset vivqa-x --eval_file ViVQA-X_val_grpo.jsonl --image_folders \
             val2014 --max_completion_length 6 --output val.jsonl --threads 1",
        )
        .ok();
    assert!(eval.stdout.contains("rewards/accuracy"), "{}", eval.stdout);
    assert_eq!(place.lines("val.jsonl").len(), 3);
}
