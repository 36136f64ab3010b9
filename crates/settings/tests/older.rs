//! Files of settings and command lines of earlier versions still work.
#![allow(clippy::unwrap_used, missing_docs)]

use omnigrpo_settings::values::Raw;
use omnigrpo_settings::{Given, Origin, find};

/// Each line has the names of a setting, its words, and its verbs, from `docs/flags.md` of version 0.2.0. A setting that is renamed keeps its
/// old name as an alias for one version, with a note.
#[test]
fn every_setting_of_0_2_0_has_its_names_words_and_verbs() {
    let mut words = 0;
    for line in include_str!("settings-0.2.0.txt").lines() {
        let [names, values, verbs] = line.split('|').collect::<Vec<_>>()[..] else { unreachable!("{line}") };
        for name in names.split_whitespace() {
            let flag = find(name).unwrap_or_else(|| panic!("`{name}` is unknown"));
            for value in values.split_whitespace() {
                let raw = Raw::Arguments(vec![value.to_owned()]);
                let given = Given::read(flag, &raw, Origin::Flag);
                assert!(given.is_ok(), "`{name}` {value}: {:?}", given.err());
                words += 1;
            }
            for verb in verbs.split(',').map(str::trim) {
                let known: Vec<_> = flag.verbs.iter().map(|verb| verb.name()).collect();
                assert!(known.iter().any(|name| name == verb), "`{verb}` does not take `{name}`: {known:?}");
            }
        }
    }
    assert!(words > 100, "{words}");
}
