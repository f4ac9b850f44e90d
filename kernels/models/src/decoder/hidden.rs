//! The hidden rows of a batch, entry by entry: as numbers, or encoded by the engine or here.
use kernels::boundary::Codec;
use kernels::threads::Threads;

use super::{Decoder, Engine, Joined, PassOutput};
use crate::hidden_rows::{HiddenRows, OnDevice};
use crate::stage::{RowsOut, StageError};

impl<E: Engine> Decoder<E> {
    /// Splits the rows of all passes among the entries of the batch.
    pub(super) fn hidden_of(
        &self,
        threads: &mut Threads,
        joined: &Joined,
        outputs: Vec<PassOutput>,
    ) -> Result<Vec<RowsOut>, StageError> {
        if self.codec == Codec::Lossless {
            let held = match &outputs[..] {
                [PassOutput::Held(_, by)] => Some(OnDevice::clone(by)),
                _ => None,
            };
            let rows = outputs.into_iter().map(PassOutput::numbers).collect::<Result<_, _>>()?;
            let mut start = 0;
            let entry = |rows: Vec<f32>| {
                let (from, rows) = (start, HiddenRows::from(rows));
                start += rows.len();
                RowsOut::Hidden(match &held {
                    Some(by) => rows.held_by(OnDevice::clone(by), from),
                    None => rows,
                })
            };
            return Ok(split(rows, self.width, &joined.entries).into_iter().map(entry).collect());
        }
        let mut encoded = |output| match output {
            PassOutput::Numbers(rows) | PassOutput::Held(rows, _) => self.codec.encode_on(threads, self.width, &rows),
            PassOutput::Encoded(rows) => rows,
        };
        let rows = outputs.into_iter().map(&mut encoded).collect();
        let bytes = self.codec.row_bytes(self.width).unwrap_or(0);
        Ok(split(rows, bytes, &joined.entries).into_iter().map(RowsOut::Encoded).collect())
    }
}

/// Splits rows of `each` items: `entries` has the entry of each row, in ascending order. The rows of a single entry are not copied.
fn split<T: Copy>(mut passes: Vec<Vec<T>>, each: usize, entries: &[usize]) -> Vec<Vec<T>> {
    let count = entries.last().map_or(0, |last| last + 1);
    if count == 1 && passes.len() == 1 {
        return std::mem::take(&mut passes);
    }
    let mut out: Vec<Vec<T>> = (0..count).map(|_| Vec::new()).collect();
    let rows = passes.iter().flat_map(|rows| rows.chunks_exact(each.max(1)));
    for (row, entry) in rows.zip(entries) {
        out[*entry].extend_from_slice(row);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn rows_of_passes_are_split_among_entries() {
        let passes = vec![vec![1, 1, 2, 2], vec![3, 3]];
        assert_eq!(split(passes.clone(), 2, &[0, 1, 1]), [vec![1, 1], vec![2, 2, 3, 3]]);
        assert_eq!(split(passes, 2, &[0, 0, 0]), [vec![1, 1, 2, 2, 3, 3]]);
        assert_eq!(split(vec![vec![1, 2]], 2, &[0]), [vec![1, 2]]);
        assert_eq!(split(Vec::<Vec<u8>>::new(), 2, &[]), Vec::<Vec<u8>>::new());
    }
}
