//! A table of bounded size, which forgets the entry that was used least recently.

use std::collections::HashMap;
use std::hash::Hash;

pub(crate) struct Recent<K, V> {
    most: usize,
    /// Number of uses so far.
    uses: u64,
    /// Values, each with the number of its last use.
    entries: HashMap<K, (u64, V)>,
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    /// Creates a table of at most `most` entries.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, uses: 0, entries: HashMap::new() }
    }

    pub(crate) fn get(&mut self, key: &K) -> Option<&mut V> {
        self.uses += 1;
        let (used, value) = self.entries.get_mut(key)?;
        *used = self.uses;
        Some(value)
    }

    /// Adds an entry. Returns the value that had to make room for it.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.uses += 1;
        let full = self.entries.len() >= self.most && !self.entries.contains_key(&key);
        let oldest =
            full.then(|| self.entries.iter().min_by_key(|(_, (used, _))| *used).map(|(key, _)| *key));
        let forgotten = oldest.flatten().and_then(|key| self.entries.remove(&key));
        let replaced = self.entries.insert(key, (self.uses, value));
        forgotten.or(replaced).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_entry_makes_room() {
        let mut table = Recent::new(3);
        assert_eq!([1, 2, 3].map(|key| table.insert(key, 10 * key)), [None; 3]);
        // 2 is now the oldest.
        assert_eq!(table.get(&1), Some(&mut 10));
        assert_eq!(table.insert(4, 40), Some(20));
        assert_eq!([1, 2, 3, 4].map(|key| table.get(&key).copied()), [Some(10), None, Some(30), Some(40)]);
        assert_eq!(table.insert(3, 31), Some(30), "a replaced value is handed back");
        // New keys in every pass, as products of streams have, keep the table at its bound.
        let forgotten = (5..1005).filter_map(|key| table.insert(key, key)).count();
        assert_eq!((forgotten, table.entries.len()), (1000, 3));
    }
}
