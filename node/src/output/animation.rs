//! Animated GIFs that are complete after every frame, and grow further after a restart.
//!
//! A comment before each frame holds its step and colour range, so that the file describes itself: a run that rolls
//! back to a checkpoint truncates the file there and continues. A frame overwrites the file's last byte, the trailer,
//! and ends with a new one; if that fails, the file is truncated to its previous length.
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use gif::{AnyExtension, Encoder, EncodingError, Frame, Repeat};
use kernels_simulations::{Field, OutputSpec};

use super::colours::{palette, wider};
use super::files::{failed, replace};
use super::{OutputError, Painter};

/// The trailer, the last byte of a file.
const END: &[u8] = &[0x3b];
/// Label of the comment extension.
const COMMENT: AnyExtension = AnyExtension(0xfe);

/// Appends blocks to a file's header.
type Adding<'a> = dyn Fn(&mut Encoder<Vec<u8>>) -> Result<(), EncodingError> + 'a;

/// A GIF on disk.
pub(super) struct Animation {
    path: PathBuf,
    painter: Painter,
    /// The job sets the colour range. Otherwise it is the widest range so far.
    fixed: bool,
    /// Display time of a frame in hundredths of a second.
    delay: u16,
    header: Vec<u8>,
    /// Invariant: the file is the header, these frames in order, and the trailer.
    frames: Vec<Part>,
}

/// A frame in the file.
#[derive(Clone, Copy)]
struct Part {
    step: u64,
    range: [f32; 2],
    /// Offset of its end in the file.
    end: u64,
}

impl Animation {
    pub(super) fn open(path: PathBuf, painter: Painter, spec: &OutputSpec, from: u64) -> Result<Self, OutputError> {
        let (fixed, delay) = (spec.range.is_some(), 100 / spec.fps.max(1));
        let mut animation = Self { path, painter, fixed, delay, header: Vec::new(), frames: Vec::new() };
        animation.header = animation.encoded(&|_| Ok(())).map_err(|error| failed(&animation.path, &error))?;
        // A file that is unreadable, or from another program, is overwritten.
        animation.frames = animation.scan().unwrap_or_default();
        animation.cut(from.saturating_add(1))?;
        Ok(animation)
    }

    pub(super) fn write(&mut self, step: u64, field: &Field) -> Result<(), OutputError> {
        self.cut(step)?;
        let before = self.frames.last().map(|part| part.range);
        let own = self.painter.range_of(field);
        let range = match before {
            Some([low, high]) => wider(self.painter.colours(), [low.min(own[0]), high.max(own[1])]),
            None => own,
        };
        let picture = self.painter.paint(field, (!self.fixed).then_some(range));
        let comment = format!("step {step} range {:08x} {:08x}", range[0].to_bits(), range[1].to_bits());
        let whole = self.encoded(&|encoder| {
            encoder.write_raw_extension(COMMENT, &[comment.as_bytes()])?;
            encoder.write_frame(&Frame {
                width: picture.width as u16,
                height: picture.height as u16,
                delay: self.delay,
                buffer: picture.pixels.as_slice().into(),
                ..Frame::default()
            })
        });
        let whole = whole.map_err(|error| failed(&self.path, &error))?;
        let start = self.end();
        let frame = &whole[self.header.len()..];
        if self.frames.is_empty() {
            replace(&self.path, &[&whole, END])?;
        } else {
            self.append(start, frame)?;
        }
        self.frames.push(Part { step, range, end: start + frame.len() as u64 });
        Ok(())
    }

    /// The header, followed by what `then` appends.
    fn encoded(&self, then: &Adding<'_>) -> io::Result<Vec<u8>> {
        let bytes = || -> Result<Vec<u8>, EncodingError> {
            let size = self.painter.size().map(|size| size as u16);
            let colours = palette(self.painter.colours()).concat();
            let mut encoder = Encoder::new(Vec::new(), size[0], size[1], &colours)?;
            encoder.set_repeat(Repeat::Infinite)?;
            then(&mut encoder)?;
            Ok(encoder.get_ref().clone())
        };
        bytes().map_err(io::Error::other)
    }

    /// Offset of the end of the last frame.
    fn end(&self) -> u64 {
        self.frames.last().map_or(self.header.len() as u64, |part| part.end)
    }

    fn append(&self, start: u64, frame: &[u8]) -> Result<(), OutputError> {
        let add = || -> io::Result<()> {
            let mut file = OpenOptions::new().write(true).open(&self.path)?;
            file.seek(SeekFrom::Start(start))?;
            // Not synced: a frame torn by a power failure is detected and written again when the run resumes.
            file.write_all(&[frame, END].concat())
        };
        add().map_err(|error| {
            let _ = self.end_at(start);
            failed(&self.path, &error)
        })
    }

    /// Truncates the file at `place` and writes the trailer there.
    fn end_at(&self, place: u64) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).open(&self.path)?;
        file.set_len(place)?;
        file.seek(SeekFrom::Start(place))?;
        file.write_all(END)
    }

    /// Removes the frames of a step and of later ones.
    fn cut(&mut self, step: u64) -> Result<(), OutputError> {
        let keep = self.frames.partition_point(|part| part.step < step);
        let shorter = keep < self.frames.len();
        self.frames.truncate(keep);
        if shorter && keep == 0 {
            return fs::remove_file(&self.path).map_err(|error| failed(&self.path, &error));
        }
        if shorter { self.end_at(self.end()).map_err(|error| failed(&self.path, &error)) } else { Ok(()) }
    }

    /// The complete frames of the file; none if another program wrote it.
    fn scan(&self) -> io::Result<Vec<Part>> {
        let mut file = Blocks { file: BufReader::new(File::open(&self.path)?), at: 0 };
        let mut header = vec![0; self.header.len()];
        file.read(&mut header)?;
        let mut parts: Vec<Part> = Vec::new();
        if header != self.header {
            return Ok(parts);
        }
        // Steps increase from frame to frame; frames out of order are dropped and written again.
        while let Ok(Some((step, range))) = file.frame() {
            if parts.last().is_some_and(|last| last.step >= step) {
                break;
            }
            parts.push(Part { step, range, end: file.at });
        }
        // Remove everything after the last complete frame.
        if let Some(last) = parts.last() {
            self.end_at(last.end)?;
        }
        Ok(parts)
    }
}

/// Reads the blocks of a GIF.
struct Blocks {
    file: BufReader<File>,
    at: u64,
}

impl Blocks {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact(bytes)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.read(&mut byte)?;
        Ok(byte[0])
    }

    /// Reads sub-blocks up to the empty one; returns the bytes of the first.
    fn blocks(&mut self) -> io::Result<Vec<u8>> {
        let mut first = None;
        loop {
            let len = usize::from(self.byte()?);
            if len == 0 {
                return Ok(first.unwrap_or_default());
            }
            let mut bytes = [0; 255];
            self.read(&mut bytes[..len])?;
            first.get_or_insert_with(|| bytes[..len].to_vec());
        }
    }

    /// Reads a frame as this module writes it (comment, control block, image); returns its step and range.
    fn frame(&mut self) -> io::Result<Option<(u64, [f32; 2])>> {
        let mut said = None;
        loop {
            match self.byte()? {
                0x21 => {
                    let kind = self.byte()?;
                    let first = self.blocks()?;
                    if kind == COMMENT.0 {
                        said = std::str::from_utf8(&first).ok().and_then(parsed);
                    }
                }
                0x2c => {
                    let mut place = [0; 9];
                    self.read(&mut place)?;
                    if place[8] & 0x80 != 0 {
                        return Ok(None);
                    }
                    self.byte()?;
                    self.blocks()?;
                    return Ok(said);
                }
                _ => return Ok(None),
            }
        }
    }
}

/// Parses a comment like `step 120 range 00000000 3f800000`.
fn parsed(comment: &str) -> Option<(u64, [f32; 2])> {
    let (step, range) = comment.strip_prefix("step ")?.split_once(" range ")?;
    let (low, high) = range.split_once(' ')?;
    let number =
        |bits: &str| u32::from_str_radix(bits, 16).ok().map(f32::from_bits).filter(|number| number.is_finite());
    Some((step.parse().ok()?, [number(low)?, number(high)?]))
}
