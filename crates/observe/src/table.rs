//! Tables of numbers that fit into the width of a terminal.

use unicode_width::UnicodeWidthStr;

use crate::text::{escape_line, fit};

/// Largest width of the first column, so that another column fits beside it.
const FIRST: usize = 40;

/// Formats rows below a header in at most `width` columns. The first cell is left-aligned, numbers are right-aligned, and each
/// column is as wide as its longest cell. Columns that do not fit continue below, with the first column repeated. Cells may come
/// from rows, so they are escaped.
pub fn columns(header: &[&str], rows: &[Vec<String>], width: usize) -> String {
    let cell = |text: &str| escape_line(text).into_owned();
    let lines: Vec<Vec<String>> = std::iter::once(header.iter().map(|text| cell(text)).collect())
        .chain(rows.iter().map(|row| row.iter().map(|text| cell(text)).collect()))
        .collect();
    let widest = |i: usize| lines.iter().filter_map(|line| Some(line.get(i)?.width())).max().unwrap_or(0);
    let first = widest(0).min(FIRST);
    let mut out = String::new();
    let mut from = 1;
    while from < header.len() || (from == 1 && header.len() == 1) {
        let mut taken = first;
        let fits = |i: &usize| {
            taken += 2 + widest(*i);
            // At least one column must follow the first, even if it is too wide.
            taken <= width || *i == from
        };
        let until = from + (from..header.len()).take_while(fits).count();
        if from > 1 {
            out.push('\n');
        }
        for line in &lines {
            let name = fit(line.first().map_or("", String::as_str), first);
            let mut text = format!("{name}{}", " ".repeat(first - name.width()));
            for i in from..until {
                let cell = line.get(i).map_or("", String::as_str);
                text.push_str(&" ".repeat(2 + widest(i) - cell.width()));
                text.push_str(cell);
            }
            out.push_str(text.trim_end());
            out.push('\n');
        }
        from = until.max(from + 1);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[&[&str]]) -> Vec<Vec<String>> {
        rows.iter().map(|row| row.iter().map(|cell| (*cell).to_owned()).collect()).collect()
    }

    #[test]
    fn columns_are_as_wide_as_their_cells_and_go_on_below() {
        let header = ["kind", "rows", "accuracy", "format"];
        let rows = rows(&[&["yes/no", "12", "0.5", "1"], &["số\u{1b}", "3", "-", "0.25"], &["図", "1"]]);
        let wide = "\
kind      rows  accuracy  format
yes/no      12       0.5       1
số\\u{1b}     3         -    0.25
図           1
";
        assert_eq!(columns(&header, &rows, 80), wide);
        assert_eq!(columns(&header, &rows, 32), wide);
        let narrow = "\
kind      rows  accuracy
yes/no      12       0.5
số\\u{1b}     3         -
図           1

kind      format
yes/no         1
số\\u{1b}    0.25
図
";
        assert_eq!(columns(&header, &rows, 31), narrow);
        // All columns are printed even if none fits.
        assert_eq!(columns(&["a", "bb", "cc"], &[], 1), "a  bb\n\na  cc\n");
        assert_eq!(columns(&["a"], &[], 80), "a\n");
    }

    #[test]
    fn a_long_name_is_cut() {
        let long = "x".repeat(100);
        let table = columns(&["name", "n"], &[vec![long, "1".into()]], 80);
        assert!(table.lines().all(|line| line.width() <= 80) && table.contains("…  1"), "{table}");
    }
}
