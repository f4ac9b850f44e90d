//! Hidden rows on their way from one stage to the next.
//!
//! They always lie in RAM, where they are sent from and kept until they arrived. The device that computed them may hold them for a
//! while too: then a stage on another device of the machine copies them from there.
use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Hidden rows `[count, width]`.
#[derive(Clone)]
pub struct HiddenRows {
    rows: Arc<Vec<f32>>,
    held: Option<Held>,
}

/// What the engine that computed the rows holds of them; engines of one kind know the type.
pub type OnDevice = Arc<dyn Any + Send + Sync>;

/// Rows on a device, from an element on.
#[derive(Clone)]
struct Held {
    by: OnDevice,
    start: usize,
}

/// Consecutive rows of an input.
#[derive(Clone, Copy)]
pub struct Piece<'a> {
    /// The rows in RAM.
    pub rows: &'a [f32],
    held: Option<(&'a OnDevice, usize)>,
}

impl HiddenRows {
    /// The same rows, which a device holds from element `start` on.
    #[must_use]
    pub fn held_by(self, by: OnDevice, start: usize) -> Self {
        Self { held: Some(Held { by, start }), ..self }
    }

    /// All rows as input.
    #[must_use]
    pub fn piece(&self) -> Piece<'_> {
        Piece { rows: &self.rows, held: self.held.as_ref().map(|held| (&held.by, held.start)) }
    }

    /// The first `at` elements, and the others; `None` if there are fewer.
    #[must_use]
    pub fn split_at(&self, at: usize) -> Option<[Self; 2]> {
        let (first, rest) = self.rows.split_at_checked(at)?;
        let part = |rows: &[f32], from: usize| {
            let held = self.held.as_ref().map(|held| Held { by: Arc::clone(&held.by), start: held.start + from });
            Self { rows: Arc::new(rows.to_vec()), held }
        };
        Some([part(first, 0), part(rest, at)])
    }

    /// Appends rows. No device holds all of them then.
    pub fn append(&mut self, more: &Self) {
        Arc::make_mut(&mut self.rows).extend_from_slice(more);
        self.held = None;
    }
}

impl From<Vec<f32>> for HiddenRows {
    fn from(rows: Vec<f32>) -> Self {
        Self { rows: Arc::new(rows), held: None }
    }
}

impl Deref for HiddenRows {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.rows
    }
}

/// Rows are equal wherever they are.
impl PartialEq for HiddenRows {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows
    }
}

impl fmt::Debug for HiddenRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows.fmt(f)
    }
}

impl<'a> Piece<'a> {
    /// Rows in RAM alone.
    #[must_use]
    pub fn in_ram(rows: &'a [f32]) -> Self {
        Self { rows, held: None }
    }

    /// What a device holds, if its engine is of this kind, and the first element there.
    #[must_use]
    pub fn held<T: Any>(&self) -> Option<(&'a T, usize)> {
        let (by, start) = self.held?;
        Some((by.downcast_ref()?, start))
    }

    /// Elements `from..to`.
    fn part(self, from: usize, to: usize) -> Self {
        Self { rows: &self.rows[from..to], held: self.held.map(|(by, start)| (by, start + from)) }
    }
}

impl fmt::Debug for Piece<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows.fmt(f)
    }
}

/// Elements `from..to` of pieces one after another.
pub(crate) fn cut<'a>(pieces: &[Piece<'a>], from: usize, to: usize) -> Vec<Piece<'a>> {
    let mut start = 0;
    let part = |piece: &Piece<'a>| {
        let (begin, end) = (start, start + piece.rows.len());
        start = end;
        let (from, to) = (from.max(begin), to.min(end));
        (from < to).then(|| piece.part(from - begin, to - begin))
    };
    pieces.iter().filter_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_rows_know_where_the_device_holds_them() {
        let by: OnDevice = Arc::new(7u32);
        let rows = HiddenRows::from(vec![0.0, 1.0, 2.0, 3.0, 4.0]).held_by(by, 10);
        let [first, rest] = rows.split_at(2).unwrap();
        assert_eq!((&first[..], first.piece().held::<u32>()), (&[0.0, 1.0][..], Some((&7, 10))));
        assert_eq!((&rest[..], rest.piece().held::<u32>()), (&[2.0, 3.0, 4.0][..], Some((&7, 12))));
        assert!(rest.piece().held::<u64>().is_none(), "of another kind of engine");
        assert!(rows.split_at(6).is_none());
        let pieces = [first.piece(), Piece::in_ram(&[8.0]), rest.piece()];
        let found = cut(&pieces, 1, 5);
        let found: Vec<_> = found.iter().map(|piece| (piece.rows, piece.held::<u32>())).collect();
        assert_eq!(found, [(&[1.0][..], Some((&7, 11))), (&[8.0][..], None), (&[2.0, 3.0][..], Some((&7, 12)))]);
        let mut all = first;
        all.append(&rest);
        assert_eq!(all, rows);
        assert!(all.piece().held::<u32>().is_none());
    }
}
