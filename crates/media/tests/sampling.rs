//! Sampling and size rules against qwen-vl-utils, NumPy and torch; goldens by `data/make_sampling.py`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use omnigrpo_media::qwen_vl::{PatchGrid, ResizeRule, smart_resize};
use omnigrpo_media::{ClipBudget, FrameSampling, MediaError, PixelBudget, QwenSampling, segment_indices};
use proptest::prelude::*;
use serde_json::Value;

fn golden(table: &str) -> Vec<Value> {
    golden_in("sampling.json", table)
}

fn golden_in(file: &str, table: &str) -> Vec<Value> {
    let path = format!("{}/tests/data/{file}", env!("CARGO_MANIFEST_DIR"));
    let mut golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    golden[table].take().as_array().unwrap().clone()
}

fn int(v: &Value) -> usize {
    v.as_u64().unwrap() as usize
}

fn ints(v: &Value) -> Vec<usize> {
    v.as_array().unwrap().iter().map(int).collect()
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * b.abs()
}

#[test]
fn sizes_equal_both_published_rules() {
    let mut num_differ = 0;
    for row in golden("resize") {
        let [h, w, low, high] = [0, 1, 2, 3].map(|i| int(&row[i]));
        let run = |rule| smart_resize(h as u32, w as u32, 28, low as f64, high as f64, rule);
        for (rule, expected) in [(ResizeRule::Processor, &row[4]), (ResizeRule::QwenVlUtils, &row[5])] {
            match expected.as_array() {
                Some(size) => {
                    let (h, w) = run(rule).unwrap();
                    assert_eq!([h as usize, w as usize], [int(&size[0]), int(&size[1])], "{row}");
                }
                None => assert!(matches!(run(rule), Err(MediaError::Shape { .. })), "{row}"),
            }
        }
        num_differ += usize::from(row[4] != row[5]);
    }
    assert!(num_differ > 0, "the table must tell the rules apart");
}

#[test]
fn sizes_by_hand() {
    let size = |h, w, low, high| smart_resize(h, w, 28, low, high, ResizeRule::Processor).unwrap();
    assert_eq!(size(90, 150, 3136.0, 12845056.0), (84, 140)); // 3.21 -> 3, 5.36 -> 5
    assert_eq!(size(42, 70, 0.0, 1e6), (56, 56)); // 1.5 and 2.5: ties to even
    let thin = smart_resize(1, 201, 28, 0.0, 1e6, ResizeRule::Processor).unwrap_err();
    assert!(thin.to_string().contains("200"), "{thin}");
    assert!(smart_resize(10, 10, 28, 2.0, 1.0, ResizeRule::Processor).is_err());
    assert!(smart_resize(10, 10, 28, 0.0, 1e6, ResizeRule::Processor).is_err()); // rounds to 0 x 0
    assert!(smart_resize(0, 10, 28, 0.0, 1e6, ResizeRule::Processor).is_err());
    let grid = PatchGrid { t: 4, h: 6, w: 10 };
    assert_eq!((grid.num_patches(), grid.num_tokens(2)), (240, 60));
}

#[test]
fn qwen_sampling_equals_qwen_vl_utils() {
    let mut num_errors = 0;
    for row in golden("qwen") {
        let get = |key: &str| row[2].get(key);
        let rule = FrameSampling::Qwen(QwenSampling {
            fps: get("fps").map(|v| v.as_f64().unwrap()),
            nframes: get("nframes").map(int),
            min_frames: get("min_frames").map(int),
            max_frames: get("max_frames").map(int),
            video_start: get("video_start").map(|v| v.as_f64().unwrap()),
            video_end: get("video_end").map(|v| v.as_f64().unwrap()),
            as_many_as_there_are: false,
        });
        let choice = rule.choose(int(&row[0]), row[1].as_f64().unwrap());
        if row[3].is_null() {
            assert!(matches!(choice, Err(MediaError::Setting { .. })), "{row}");
            num_errors += 1;
            continue;
        }
        let choice = choice.unwrap();
        assert_eq!(choice.indices, ints(&row[3][0]), "{row}");
        assert!(close(choice.sampled_fps, row[3][1].as_f64().unwrap()), "{row}");
    }
    assert!(num_errors > 0);
    let both = QwenSampling { fps: Some(1.0), nframes: Some(4), ..Default::default() };
    assert!(FrameSampling::Qwen(both).choose(100, 10.0).is_err());
}

#[test]
fn frame_budget_equals_qwen_vl_utils() {
    let mut num_checked = 0;
    for row in golden("budget") {
        let get = |key: &str| row[3].get(key).and_then(Value::as_u64);
        let budget = PixelBudget {
            min_pixels: get("min_pixels"),
            max_pixels: get("max_pixels"),
            total_pixels: get("total_pixels").map(|p| p as f64),
        };
        let size = budget.frame_size(int(&row[2]), int(&row[0]) as u32, int(&row[1]) as u32, 28).unwrap();
        assert_eq!([size.0 as usize, size.1 as usize], [int(&row[4][0]), int(&row[4][1])], "{row}");
        num_checked += 1;
    }
    assert_eq!(num_checked, 80);
    // R1-V gives 240 * 240 and no minimum, less than the default minimum.
    let budget = PixelBudget { max_pixels: Some(57600), ..Default::default() };
    assert_eq!(budget.area_bounds(4, 28), (57600.0, 57600.0));
}

#[test]
fn base_interval_equals_qwen_vl_finetune() {
    for row in golden("base") {
        let rule = FrameSampling::BaseInterval {
            interval_secs: row[2].as_f64().unwrap(),
            min_frames: int(&row[3]),
            max_frames: int(&row[4]),
        };
        let choice = rule.choose(int(&row[0]), row[1].as_f64().unwrap()).unwrap();
        assert_eq!(choice.indices, ints(&row[5]), "{row}");
        assert!(close(choice.sampled_fps, row[6].as_f64().unwrap()), "{row}");
    }
}

/// Frames and their size as `Qwen3VLVideoProcessor` has them; goldens by `data/make_video_processor.py`.
#[test]
fn rates_and_clip_budgets_equal_the_published_processor() {
    for row in golden_in("video_processor.json", "frames") {
        let rule = FrameSampling::Rate {
            fps: row[2].as_f64().unwrap(),
            min_frames: int(&row[3]),
            max_frames: int(&row[4]),
        };
        let choice = rule.choose(int(&row[0]), row[1].as_f64().unwrap()).unwrap();
        assert_eq!(choice.indices, ints(&row[5]), "{row}");
    }
    let mut refused = 0;
    for row in golden_in("video_processor.json", "sizes") {
        let [n, h, w, low, high] = [0, 1, 2, 3, 4].map(|i| int(&row[i]));
        let budget = ClipBudget { min_pixels: low as u64, max_pixels: high as u64, slice_frames: 2 };
        match (budget.frame_size(n, h as u32, w as u32, 32), row[5].as_array()) {
            (Ok((h, w)), Some(size)) => {
                assert_eq!([h as usize, w as usize], [int(&size[0]), int(&size[1])], "{row}");
            }
            (Err(_), None) => refused += 1,
            (got, _) => panic!("{row}: {got:?}"),
        }
    }
    assert!(refused > 0);
    let budget = ClipBudget { min_pixels: 2, max_pixels: 1, slice_frames: 2 };
    assert!(budget.frame_size(4, 64, 64, 32).unwrap_err().to_string().contains("minimum <= maximum"));
    let budget = ClipBudget { min_pixels: 1, max_pixels: 1 << 20, slice_frames: 2 };
    assert!(budget.frame_size(1, 64, 64, 32).unwrap_err().to_string().contains("picture as an image"));
    assert!(budget.frame_size(4, 0, 64, 32).is_err() && budget.frame_size(4, 64, 64, 0).is_err());
    let rule = FrameSampling::Rate { fps: 0.0, min_frames: 4, max_frames: 8 };
    assert!(rule.choose(10, 25.0).unwrap_err().to_string().contains("positive rate"));
}

#[test]
fn midpoints_equal_human_omni() {
    for row in golden("middle") {
        let choice = FrameSampling::Midpoints { num_frames: 8 }.choose(int(&row[0]), 25.0).unwrap();
        assert_eq!(choice.indices, ints(&row[1]), "{row}");
    }
}

#[test]
fn every_segment_is_sampled() {
    // 15 frames: linspace(0, 14, 4) = 0, 4.67, 9.33, 14; 11 frames from 15 on: 0, 3.33, 6.67, 10.
    assert_eq!(segment_indices(&[15.0, 11.0], 4).unwrap(), [0, 4, 9, 14, 15, 18, 21, 25]);
    assert_eq!(segment_indices(&[2.0, 3.0], 4).unwrap(), [0, 1, 2, 3, 4]);
    assert_eq!(segment_indices(&[7.0], 1).unwrap(), [0]);
    assert!(segment_indices(&[], 4).is_err());
    assert!(segment_indices(&[f64::NAN], 4).is_err());
    assert!(segment_indices(&[5.0], 0).is_err());
    let rule = FrameSampling::Segments { frame_counts: vec![15.0, 11.0], num_frames: 4 };
    let choice = rule.choose(26, 10.0).unwrap();
    assert!(close(choice.sampled_fps, 8.0 / 2.6));
    let error = rule.choose(20, 10.0).unwrap_err();
    assert!(error.to_string().contains("20 frames"), "{error}");
}

#[test]
fn a_short_video_gives_what_it_has_where_that_is_allowed() {
    let rule = |qwen| FrameSampling::Qwen(QwenSampling { as_many_as_there_are: true, ..qwen });
    let eight = |total| {
        let choice = rule(QwenSampling { nframes: Some(8), ..Default::default() }).choose(total, 10.0);
        choice.unwrap()
    };
    assert_eq!(eight(1).indices, [0]);
    assert_eq!(eight(3).indices, [0, 2]);
    assert_eq!(eight(5).indices, [0, 1, 3, 4]); // 0, 1.33, 2.67, 4
    assert_eq!(eight(15).indices, [0, 2, 4, 6, 8, 10, 12, 14]);
    assert!(close(eight(16).sampled_fps, 5.0));
    assert_eq!(rule(QwenSampling::default()).choose(1, 2.0).unwrap().indices, [0]);
    // A time range counts as the video.
    let range = QwenSampling { nframes: Some(8), video_start: Some(0.5), ..Default::default() };
    assert_eq!(rule(range).choose(10, 10.0).unwrap().indices, [5, 6, 8, 9]);
}

#[test]
fn what_a_video_cannot_give_is_said() {
    let error = |qwen, total| FrameSampling::Qwen(qwen).choose(total, 10.0).unwrap_err().to_string();
    let eight = QwenSampling { nframes: Some(8), ..Default::default() };
    let said = error(eight, 5);
    assert!(said.contains("got 8 (taken in pairs), expected 2 to 5"), "{said}");
    let said = error(QwenSampling::default(), 1);
    assert!(said.contains("got 1 frame, expected at least 2") && said.contains("as an image"), "{said}");
    let backwards = QwenSampling { video_end: Some(0.05), ..Default::default() };
    let said = error(backwards, 50);
    assert!(said.contains("got the start to 0.05 s, which are frames 0 to 0"), "{said}");
}

/// Rows can ask for any number; the choice is made before anything is known of the row's length.
#[test]
fn no_number_of_frames_takes_memory() {
    let most = u32::MAX as usize;
    assert!(FrameSampling::Midpoints { num_frames: most }.choose(5, 10.0).is_err());
    let times = |times_secs: &[f64]| FrameSampling::Times { times_secs: times_secs.to_vec() };
    assert_eq!(times(&[-1.0, 0.19, 0.31, 9.0]).choose(5, 10.0).unwrap().indices, [0, 2, 3, 4]);
    for wrong in [&[][..], &[0.2, 0.1], &[f64::NAN, 0.1]] {
        assert!(times(wrong).choose(5, 10.0).is_err(), "{wrong:?}");
    }
    let interval = FrameSampling::BaseInterval { interval_secs: 2.0, min_frames: most, max_frames: most };
    assert_eq!(interval.choose(5, 10.0).unwrap().indices, [0, 1, 2, 3, 4]);
    let fewest = QwenSampling { min_frames: Some(most), ..Default::default() };
    assert_eq!(FrameSampling::Qwen(fewest).choose(5, 10.0).unwrap().indices, [0, 1, 3, 4]);
}

#[test]
fn lists_keep_every_picture_unless_told_otherwise() {
    let default = FrameSampling::Qwen(QwenSampling::default());
    assert_eq!(default.choose_listed(5, 2.0).unwrap().indices, [0, 1, 2, 3, 4]);
    assert_eq!(default.choose_listed(1, 2.0).unwrap().indices, [0]);
    assert!(default.choose(1, 2.0).is_err());
    let thinned = default.choose_listed(1000, 2.0).unwrap();
    assert_eq!((thinned.indices.len(), thinned.indices[767]), (768, 999));
    let three = FrameSampling::Qwen(QwenSampling { max_frames: Some(3), ..Default::default() });
    assert_eq!(three.choose_listed(7, 2.0).unwrap().indices, [0, 6]);
    assert!(default.choose_listed(0, 2.0).is_err());
    let four = FrameSampling::Qwen(QwenSampling { nframes: Some(4), ..Default::default() });
    assert_eq!(four.choose_listed(7, 2.0).unwrap().indices, [0, 2, 4, 6]);
}

proptest! {
    #[test]
    fn choices_are_in_range_and_ordered(total in 1usize..5000, fps in 0.1f64..120.0, n in 1usize..64) {
        for rule in [
            FrameSampling::Qwen(QwenSampling::default()),
            FrameSampling::Qwen(QwenSampling { nframes: Some(n), ..Default::default() }),
            FrameSampling::BaseInterval { interval_secs: 2.0, min_frames: 4, max_frames: 8 },
            FrameSampling::Midpoints { num_frames: n },
            FrameSampling::Qwen(QwenSampling { nframes: Some(n), as_many_as_there_are: true, ..Default::default() }),
        ] {
            let Ok(choice) = rule.choose(total, fps) else { continue };
            prop_assert!(!choice.indices.is_empty());
            prop_assert!(choice.indices.is_sorted());
            prop_assert!(choice.indices.iter().all(|&i| i < total));
            prop_assert!(choice.sampled_fps > 0.0);
        }
    }

    #[test]
    fn sizes_keep_the_bounds(h in 1u32..4000, w in 1u32..4000) {
        for rule in [ResizeRule::Processor, ResizeRule::QwenVlUtils] {
            let Ok((rh, rw)) = smart_resize(h, w, 28, 3136.0, 1_003_520.0, rule) else {
                prop_assert!(f64::from(h.max(w)) / f64::from(h.min(w)) > 200.0);
                continue;
            };
            prop_assert!(rh % 28 == 0 && rw % 28 == 0);
            let area = f64::from(rh) * f64::from(rw);
            // A side never goes below the factor, which is the only way past the upper bound.
            prop_assert!(area >= 3136.0 && (area <= 1_003_520.0 || rh.min(rw) == 28));
        }
    }
}
