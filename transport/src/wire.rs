//! Reads fixed little-endian fields from untrusted bytes: every read is checked, nothing panics.

/// Untrusted text, safe to display: at most `chars_max` characters, without control characters, which logs and
/// terminals would interpret.
pub fn printable(text: &str, chars_max: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(chars_max).collect()
}

/// The unread rest of a byte string.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next `n` bytes, or `None` if there are fewer.
    pub(crate) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(n)?;
        self.0 = tail;
        Some(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[b]| b)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads bytes with a one-byte length prefix of at most `max`.
    pub(crate) fn short(&mut self, max: usize) -> Option<&'a [u8]> {
        let n = usize::from(self.u8()?);
        if n > max { None } else { self.take(n) }
    }

    /// Reads bytes with a four-byte length prefix of at most `max`.
    pub(crate) fn long(&mut self, max: usize) -> Option<&'a [u8]> {
        let n = usize::try_from(self.u32()?).ok()?;
        if n > max { None } else { self.take(n) }
    }

    /// `Some(())` if everything has been read.
    pub(crate) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

/// Appends `bytes` with a one-byte length prefix. Callers stay within 255 bytes; longer input is truncated.
pub(crate) fn put_short(out: &mut Vec<u8>, bytes: &[u8]) {
    let n = u8::try_from(bytes.len()).unwrap_or(u8::MAX);
    out.push(n);
    out.extend_from_slice(&bytes[..usize::from(n)]);
}

/// Appends `bytes` with a four-byte length prefix.
pub(crate) fn put_long(out: &mut Vec<u8>, bytes: &[u8]) {
    let n = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&n.to_le_bytes());
    out.extend_from_slice(&bytes[..n as usize]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strangers_text_cannot_control_a_terminal() {
        assert_eq!(printable("\u{1b}[2J\u{9b}31mn6\r\n\u{7}", 64), "[2J31mn6");
        assert_eq!(printable("ääää", 3), "äää");
    }
}
