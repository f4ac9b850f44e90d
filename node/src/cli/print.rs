//! Text for the user: the answer on stdout, remarks on stderr.
use serde::Serialize;
use std::io::Write;

/// Prints one line (or block) of the answer to stdout.
pub(super) fn say(text: impl std::fmt::Display) {
    // A reader that closed the pipe (`| head`) needs no more output.
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Prints an answer as one line of JSON to stdout.
pub(super) fn say_json(answer: &impl Serialize) {
    say(serde_json::to_string(answer).unwrap_or_default());
}

/// Prints a remark to stderr.
pub(super) fn remark(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Escapes control characters: some errors quote files and responses, which could otherwise control the terminal.
pub(super) fn printable(text: &str) -> String {
    let is_plain = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().map(|c| if is_plain(c) { c.to_string() } else { c.escape_default().to_string() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_a_file_do_not_reach_the_terminal() {
        assert_eq!(printable("found \u{1b}[2Jé\u{7}\nnext"), "found \\u{1b}[2Jé\\u{7}\nnext");
    }

    #[test]
    fn control_characters_of_files_are_not_sent_to_the_terminal() {
        let error = "key \u{1b}[2J\u{7}\u{9b}31m\r: expected a name\n\tas in é";
        assert_eq!(printable(error), "key \\u{1b}[2J\\u{7}\\u{9b}31m\\r: expected a name\n\tas in é");
    }
}
