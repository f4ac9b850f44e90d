//! Reads the header of a weights file. Its length is only known from parsing, so the read grows until the header is complete.
use bytes::Bytes;

use super::error::WeightsError;
use super::source::Source;

/// Bytes of the first read of a header; most headers fit.
const BYTES_FIRST: u64 = 4 << 20;
/// Maximum header length: the largest vocabularies with scores and merges need about 30 MiB.
const BYTES_MAX: u64 = 256 << 20;

/// Calls `parse` with a prefix of the source and the source's length, until the prefix is long enough.
///
/// # Errors
/// An error of `parse`, a header longer than the maximum, or the source cannot be read.
pub(super) fn read<T>(
    source: &Source,
    parse: impl Fn(&Bytes, u64) -> Result<T, WeightsError>,
) -> Result<T, WeightsError> {
    let len = source.len();
    let first = if source.is_memory() { len } else { BYTES_FIRST };
    let mut part = source.read(&(0..len.min(first)))?;
    loop {
        let here = part.len() as u64;
        match parse(&part, len) {
            Err(WeightsError::Truncated { what, need, .. }) if here < len => {
                if need > len {
                    return Err(WeightsError::Truncated { what, need, have: len });
                }
                if need > BYTES_MAX {
                    return Err(WeightsError::Malformed(format!(
                        "expected a header of at most {BYTES_MAX} bytes, found that {what} reaches byte {need}"
                    )));
                }
                part = source.read(&(0..need.max(2 * here).min(BYTES_MAX).min(len)))?;
            }
            other => return other,
        }
    }
}
