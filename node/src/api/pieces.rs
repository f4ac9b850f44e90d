//! Incremental detokenization: emits whole UTF-8 characters only, and holds back text that may begin a stop string.
use std::collections::VecDeque;

/// Assembles characters and holds back possible beginnings of stop strings.
///
/// The concatenated pieces are the lossy UTF-8 of all bytes, up to (not including) the first stop string.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Bytes of an incomplete character: at most 3.
    bytes: Vec<u8>,
    /// Text held back: shorter than the longest stop string.
    held: String,
    stops: Vec<String>,
    /// The number of the stop string that has appeared.
    stopped: Option<usize>,
}

impl Pieces {
    /// `stops`: non-empty strings.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { bytes: Vec::new(), held: String::new(), stops, stopped: None }
    }

    /// Appends the bytes of one token and returns the text that may be emitted now.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        self.bytes.extend_from_slice(bytes);
        let text = take_whole(&mut self.bytes);
        self.show(&text)
    }

    /// The stop string that has appeared; text after it is dropped.
    pub(crate) fn stopped_by(&self) -> Option<&str> {
        self.stopped.map(|at| self.stops[at].as_str())
    }

    /// Ends the text and returns what was held back.
    pub(crate) fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned();
        let mut text = self.show(&rest);
        if self.stopped.is_none() {
            text.push_str(&std::mem::take(&mut self.held));
        }
        text
    }

    fn show(&mut self, text: &str) -> String {
        if self.stopped.is_some() {
            return String::new();
        }
        self.held.push_str(text);
        let found =
            self.stops.iter().enumerate().filter_map(|(stop, text)| Some((self.held.find(text.as_str())?, stop)));
        if let Some((at, stop)) = found.min() {
            self.stopped = Some(stop);
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        self.held.drain(..self.held.len() - keep).collect()
    }
}

/// Length of the longest proper prefix of `stop` that `text` ends with.
pub(super) fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest).rev().find(|&n| stop.is_char_boundary(n) && text.ends_with(&stop[..n])).unwrap_or(0)
}

/// Removes the decided bytes from the front: valid characters, and U+FFFD for bytes that no later byte can complete.
fn take_whole(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut rest: VecDeque<u8> = VecDeque::new();
    let mut chunks = bytes.utf8_chunks().peekable();
    while let Some(chunk) = chunks.next() {
        text.push_str(chunk.valid());
        let invalid = chunk.invalid();
        let may_grow = chunks.peek().is_none() && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
        if may_grow {
            rest.extend(invalid);
        } else if !invalid.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
    *bytes = rest.into();
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(stops: &[&str], pieces: &[&[u8]]) -> (Vec<String>, bool) {
        let mut assembler = Pieces::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut texts: Vec<String> = pieces.iter().map(|p| assembler.push(p)).collect();
        texts.push(assembler.finish());
        (texts, assembler.stopped_by().is_some())
    }

    #[test]
    fn characters_are_shown_whole() {
        let (texts, _) = shown(&[], &[b"na", b"\xc3", b"\xafve \xf0\x9f", b"\x99\x82", b"\xff!", b"\xe2\x82"]);
        assert_eq!(texts, ["na", "", "ïve ", "🙂", "\u{fffd}!", "", "\u{fffd}"]);
    }

    #[test]
    fn a_stop_string_across_tokens_is_held_back_and_never_shown() {
        let (texts, stopped) = shown(&["\n\nUser:"], &[b"Hi.", b"\n", b"\nUs", b"er: more", b"and more"]);
        assert_eq!(texts, ["Hi.", "", "", "", "", ""]);
        assert!(stopped);
    }

    #[test]
    fn held_back_text_that_is_no_stop_string_is_shown() {
        let (texts, stopped) = shown(&["END"], &[b"the E", b"N", b"d EN"]);
        assert_eq!(texts, ["the ", "", "ENd ", "EN"]);
        assert!(!stopped);
    }

    #[test]
    fn the_earliest_stop_wins() {
        let (texts, stopped) = shown(&["bc", "abc", "é"], &[b"xabcy"]);
        assert_eq!((texts.concat().as_str(), stopped), ("x", true));
        let mut assembler = Pieces::new(vec!["bc".into(), "abc".into()]);
        assembler.push(b"xabcy");
        assert_eq!(assembler.stopped_by(), Some("abc"));
        let (texts, _) = shown(&["é"], &[b"caf\xc3", b"\xa9!"]);
        assert_eq!(texts.concat(), "caf");
    }

    /// The shown text ends before the first stop string, however the text is split into tokens.
    #[test]
    fn every_split_shows_the_same_text() {
        let text = "aab🙂ab aabaac stop";
        for stop in ["aabaac", "🙂", "b a", "p", "zzz", "aac stop!"] {
            let expected = text.find(stop).map_or(text, |at| &text[..at]);
            for size in 1..=7 {
                let pieces: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
                let (texts, stopped) = shown(&[stop], &pieces);
                assert_eq!(texts.concat(), expected, "stop {stop:?}, pieces of {size}");
                assert_eq!(stopped, text.contains(stop));
            }
        }
    }
}
