//! Plain text tables.

/// Renders left-aligned columns two spaces apart; the first row is the heading.
pub(super) fn render(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|r| r.get(column)).map(|cell| console::measure_text_width(cell)).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    rows.iter()
        .map(|row| {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| console::pad_str(cell, *width, console::Alignment::Left, None).into_owned())
                .collect();
            format!("{}\n", cells.join("  ").trim_end())
        })
        .collect()
}

/// A row of strings.
pub(super) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.iter().map(|c| (*c).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let text = render(&[row(["NAME", "STATE"]), row(["ädä", "up"]), row(["longer", "down"])]);
        assert_eq!(text, "NAME    STATE\nädä     up\nlonger  down\n");
    }
}
