//! Rules about the text of the sources that no compiler checks: first lines, lengths, plain words, bounded channels, links.
use std::fs;
use std::path::{Path, PathBuf};
use system_tests::repository;

/// Most lines of a source file. A longer one is split.
const LINES_MAX: usize = 700;
/// Most characters of a comment line: rustfmt does not wrap comments.
const CHARACTERS_MAX: usize = 140;

/// Words and idioms with a plain substitute, which follows. They stand for no other thing, so they are banned everywhere,
/// identifiers included. Two parts each, so that this file does not contain them.
const BANNED: [(&str, &str, &str); 24] = [
    ("who", "ever", "the name of the role"),
    ("who", "m", "the name of the role"),
    ("an", "ew", "again"),
    ("there", "by", "a sentence of its own"),
    ("where", "fore", "why"),
    ("no", "body", "no node, no user"),
    ("some", "body", "a node, a user"),
    ("so", " many", "a number"),
    ("is", " told", "receives, learns"),
    ("are", " told", "receive, learn"),
    ("was", " told", "received, learned"),
    ("be", " told", "receive, learn"),
    ("stands", " by", "is the standby of"),
    ("stand", " by", "be the standby of"),
    ("steps in", " for", "takes over from"),
    ("for", " people", "human-readable"),
    ("wed", "ged", "stalled"),
    ("hei", "r", "successor"),
    ("le", "st", "so that … not"),
    ("made", " again", "replayed, recomputed"),
    ("put", " aside", "saved"),
    ("how", " deep", "halo depth"),
    ("does not", " get on", "is stalled"),
    ("mint", "er", "issuer"),
];

/// Constructors of channels without a bound. Two parts each, as above.
const UNBOUNDED: [(&str, &str); 2] = [("unbounded", "_channel("), ("mpsc::channel", "()")];

/// Files that may make such a channel, and what bounds it.
const BOUNDED_OTHERWISE: [(&str, &str); 3] = [
    ("node/src/driver/queue.rs", "the credits of each peer's lanes, and the limits of the local API"),
    ("node/src/device_thread.rs", "the core, which has a bounded number of commands in flight"),
    ("node/src/cli/bench/net.rs", "the rounds of the benchmark"),
];

#[test]
fn the_first_line_of_a_source_file_says_why_it_exists() {
    let is_documented = |text: &str| text.lines().next().is_some_and(|line| line.starts_with("//! "));
    let wrong = files("rs").into_iter().filter(|(_, text)| !is_documented(text)).map(|(path, _)| path);
    assert_none(wrong.collect(), "begin with a line `//! …` that says why the file exists");
}

#[test]
fn source_files_and_lines_are_short() {
    let mut wrong = Vec::new();
    for (path, text) in files("rs") {
        let lines = text.lines().count();
        if lines > LINES_MAX {
            wrong.push(format!("{path}: {lines} lines, expected at most {LINES_MAX}"));
        }
        for (number, line) in (1..).zip(text.lines()) {
            let length = line.chars().count();
            if line.trim_start().starts_with("//") && length > CHARACTERS_MAX && !line.contains("://") {
                wrong.push(format!("{path}:{number}: {length} characters, expected at most {CHARACTERS_MAX}"));
            }
        }
    }
    assert_none(wrong, "are too long");
}

#[test]
fn texts_use_plain_words() {
    let mut wrong = Vec::new();
    for (path, text) in ["rs", "md", "toml", "py"].into_iter().flat_map(files) {
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.to_lowercase();
            for (start, end, instead) in BANNED {
                let banned = [start, end].concat();
                if has_word(&line, &banned) {
                    wrong.push(format!("{path}:{number}: `{banned}`; say: {instead}"));
                }
            }
        }
    }
    assert_none(wrong, "use a banned word");
}

#[test]
fn channels_have_bounds() {
    let mut wrong = Vec::new();
    for (path, text) in files("rs") {
        let is_test = path.contains("/tests") || path.starts_with("tests/") || path.contains("/benches/");
        if is_test || BOUNDED_OTHERWISE.iter().any(|(known, _)| *known == path) {
            continue;
        }
        // Unit tests come last in a file.
        let code = text.lines().take_while(|line| *line != "#[cfg(test)]");
        for (number, line) in (1..).zip(code) {
            if UNBOUNDED.iter().any(|(start, end)| line.contains(&[*start, *end].concat())) {
                wrong.push(format!("{path}:{number}: {}", line.trim()));
            }
        }
    }
    assert_none(wrong, "make a channel without a bound; use `sync_channel` or `channel(BOUND)`");
}

#[test]
fn links_between_pages_lead_somewhere() {
    let mut wrong = Vec::new();
    for (path, text) in files("md") {
        let folder = Path::new(&path).parent().unwrap_or(Path::new(""));
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            if target.contains("://") {
                continue;
            }
            let file = if file.is_empty() { PathBuf::from(&path) } else { folder.join(file) };
            match fs::read_to_string(repository().join(&file)) {
                Ok(page) if !anchor.is_empty() && !anchors(&page).any(|known| known == anchor) => {
                    wrong.push(format!("{path}: no heading `#{anchor}` in {}", file.display()));
                }
                Ok(_) => {}
                Err(_) if repository().join(&file).is_dir() => {}
                Err(error) => wrong.push(format!("{path}: {}: {error}", file.display())),
            }
        }
    }
    assert_none(wrong, "have a broken link");
}

/// The anchors of a page's headings, as GitHub forms them.
fn anchors(page: &str) -> impl Iterator<Item = String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| {
        let text = line.trim_start_matches('#').trim().to_lowercase();
        let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    })
}

/// Whether a line has a word or phrase that is not part of a longer word or name.
fn has_word(line: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let (before, after) = (&line[..at], &line[at + word.len()..]);
        !before.chars().next_back().is_some_and(is_part) && !after.chars().next().is_some_and(is_part)
    })
}

#[test]
fn a_word_is_found_whole_only() {
    assert!(has_word("a newest test", "test") && has_word("`test`", "test"));
    assert!(!has_word("the newest tests", "test") && !has_word("a_test", "test"));
}

/// Paths from the repository's root, and texts, of all files with this ending.
pub(crate) fn files(ending: &str) -> Vec<(String, String)> {
    let root = repository();
    let mut found = Vec::new();
    let mut open = vec![root.clone()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the repository").flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if name.starts_with('.') || name == "target" {
                continue;
            }
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|known| known == ending) {
                let text = fs::read_to_string(&path).expect("a readable file");
                let path = path.strip_prefix(&root).expect("a path in the repository");
                found.push((path.to_string_lossy().into_owned(), text));
            }
        }
    }
    assert!(!found.is_empty(), "no file *.{ending} in {}", root.display());
    found.sort();
    found
}

fn assert_none(wrong: Vec<String>, what: &str) {
    assert!(wrong.is_empty(), "{} places {what}:\n{}", wrong.len(), wrong.join("\n"));
}
