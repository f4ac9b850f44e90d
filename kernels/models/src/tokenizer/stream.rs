//! Streaming decoder: turns tokens into text as soon as they form complete characters.
use super::Tokenizer;

/// Decodes one token at a time; the bytes of an incomplete character are held back.
///
/// The concatenated output equals the lossy UTF-8 decoding of all bytes.
#[derive(Debug)]
pub struct Decoder<'a> {
    tokenizer: &'a Tokenizer,
    pending: Vec<u8>,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, pending: Vec::new() }
    }

    /// Adds a token and returns the text completed by it (possibly empty).
    pub fn push(&mut self, id: u32) -> String {
        self.pending.extend(self.tokenizer.text_bytes(id));
        take_complete(&mut self.pending)
    }

    /// Ends the stream; incomplete bytes become U+FFFD.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Removes the decided prefix: valid characters, and U+FFFD for bytes that no continuation can complete.
fn take_complete(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut done = 0;
    for chunk in pending.utf8_chunks() {
        text.push_str(chunk.valid());
        done += chunk.valid().len();
        let invalid = chunk.invalid();
        let last = done + invalid.len() == pending.len();
        // An incomplete character at the end may still be completed.
        if last && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none()) {
            break;
        }
        if !invalid.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
    }
    pending.drain(..done);
    text
}

#[cfg(test)]
mod tests {
    use super::take_complete;

    /// Every split of a byte string into pieces of one to three bytes gives its lossy text.
    #[test]
    fn pieces_join_to_the_lossy_text() {
        let cases: [&[u8]; 6] = [
            "naïve 日本語 🙂 end".as_bytes(),
            b"\xff\xfeabc\xe2\x82",
            b"\xf0\x9f\x99\x41\x80",
            b"\xed\xa0\x80x\xc0\x80",
            b"",
            b"\xf0\x9f\x99\x82\xf0\x9f",
        ];
        for bytes in cases {
            for step in 1..=3 {
                let (mut pending, mut text) = (Vec::new(), String::new());
                for piece in bytes.chunks(step) {
                    pending.extend(piece);
                    text.push_str(&take_complete(&mut pending));
                    assert!(pending.len() < 4, "more than a character was held back");
                }
                text.push_str(&String::from_utf8_lossy(&pending));
                assert_eq!(text, String::from_utf8_lossy(bytes), "{bytes:x?} by {step}");
            }
        }
    }
}
