//! Run-length encoded (RLE) patterns, the common exchange format for Life.
use super::Life;
use crate::error::GridError;
use crate::region::SIZE_MAX;

/// Maximum runs of live cells: 12 bytes each, from as little as two bytes of text.
pub const RUNS_MAX: usize = 1 << 24;

/// A pattern of live cells, and its rule if the file names one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Columns: from the header, else the extent of the live cells.
    pub width: usize,
    /// Rows, likewise.
    pub height: usize,
    /// The rule in the header.
    pub rule: Option<Life>,
    /// Live cells as runs, row by row; at most one per run in the text, whatever its length.
    pub runs: Vec<Run>,
}

/// Adjacent live cells of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// The row, from the top.
    pub y: u32,
    /// The first column, from the left.
    pub start: u32,
    /// The end column, exclusive.
    pub end: u32,
}

impl Pattern {
    /// [x, y] of the live cells, row by row from the upper left.
    pub fn alive(&self) -> impl Iterator<Item = [usize; 2]> + '_ {
        self.runs.iter().flat_map(|run| (run.start..run.end).map(|x| [x as usize, run.y as usize]))
    }

    /// Parses an RLE file: comments (`#`), `x = 3, y = 3, rule = B3/S23`, then runs of `b` (dead), `o` (alive) and `$`
    /// (end of a row) up to `!`. The header is optional; its bounded-grid suffix (`:T100,100`) is ignored.
    ///
    /// # Errors
    /// A syntax error or a size limit, with its line.
    pub fn parse(text: &str) -> Result<Self, GridError> {
        let mut lines = text.lines().enumerate().map(|(i, line)| (i + 1, line.trim()));
        let mut lines = lines.by_ref().filter(|(_, line)| !line.is_empty() && !line.starts_with('#')).peekable();
        let Some(&(line, first)) = lines.peek() else {
            return error(
                1,
                "it is empty: expected x = WIDTH, y = HEIGHT, then runs of b (dead), o (alive) and $, then !",
            );
        };
        let headed = first.contains('=');
        let mut pattern = Pattern { width: SIZE_MAX, height: SIZE_MAX, rule: None, runs: Vec::new() };
        if headed {
            pattern = header_of(line, first)?;
            lines.next();
        }
        let (mut x, mut y, mut run) = (0, 0, None::<usize>);
        let mut last = line;
        for (line, text) in lines {
            last = line;
            for sign in text.chars() {
                if let Some(digit) = sign.to_digit(10) {
                    let length = run.unwrap_or(0) * 10 + digit as usize;
                    if length > SIZE_MAX {
                        return error(line, format!("a run of {length}: expected at most {SIZE_MAX}"));
                    }
                    run = Some(length);
                    continue;
                }
                if sign.is_whitespace() {
                    continue;
                }
                let count = run.take().unwrap_or(1);
                match sign {
                    'b' | '.' => x += count,
                    'o' | 'A' => {
                        if x + count > pattern.width || y >= pattern.height {
                            let Pattern { width, height, .. } = pattern;
                            let at = x + count;
                            return error(line, format!("row {} reaches column {at} of {width} × {height}", y + 1));
                        }
                        // Width and height are at most `SIZE_MAX`, with or without a header.
                        let run = Run { y: y as u32, start: x as u32, end: (x + count) as u32 };
                        let joins = |last: &Run| last.y == run.y && last.end == run.start;
                        if let Some(last) = pattern.runs.last_mut().filter(|last| joins(last)) {
                            last.end = run.end;
                        } else if pattern.runs.len() < RUNS_MAX {
                            pattern.runs.push(run);
                        } else {
                            return error(line, format!("more than {RUNS_MAX} runs of living cells"));
                        }
                        x += count;
                    }
                    '$' => (x, y) = (0, y + count),
                    '!' => {
                        if !headed {
                            pattern.width = pattern.runs.iter().map(|run| run.end as usize).max().unwrap_or(0);
                            pattern.height = pattern.runs.last().map_or(0, |run| run.y as usize + 1);
                        }
                        return Ok(pattern);
                    }
                    other => return error(line, format!("expected b, o, $ or !, found {other:?}")),
                }
            }
        }
        error(last, "the pattern does not end: ! is missing")
    }
}

fn header_of(line: usize, header: &str) -> Result<Pattern, GridError> {
    let mut pattern = Pattern { width: 0, height: 0, rule: None, runs: Vec::new() };
    for part in header.split(':').next().unwrap_or_default().split(',') {
        let Some((name, value)) = part.split_once('=').map(|(name, value)| (name.trim(), value.trim())) else {
            return error(line, format!("{part:?} in the header: expected x = WIDTH, y = HEIGHT, rule = B3/S23"));
        };
        let size = || match value.parse() {
            Ok(size) if (1..=SIZE_MAX).contains(&size) => Ok(size),
            _ => error(line, format!("{name} = {value:?}: expected 1 to {SIZE_MAX}")),
        };
        match name {
            "x" => pattern.width = size()?,
            "y" => pattern.height = size()?,
            "rule" => match Life::parse(value) {
                Ok(rule) => pattern.rule = Some(rule),
                Err(found) => return error(line, found.to_string()),
            },
            other => return error(line, format!("{other:?} in the header: expected x, y or rule")),
        }
    }
    if pattern.width == 0 || pattern.height == 0 {
        return error(line, "the header needs both x and y");
    }
    Ok(pattern)
}

fn error<T>(line: usize, what: impl Into<String>) -> Result<T, GridError> {
    Err(GridError::Pattern { line, what: what.into() })
}
