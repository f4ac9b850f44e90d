//! Renders frames in a terminal: two pixels per character, in 24-bit colours.
use std::fmt::Write;

use kernels_simulations::Field;

use super::Painter;

/// Most characters per line, and most lines: more than any screen has.
const CHARACTERS_MAX: usize = 1000;

/// Renders a frame within `columns` × `lines` characters, keeping its proportions. Each character is an upper half
/// block: its foreground is the upper pixel, its background the lower one. Lines end in "\n"; colours are reset at the
/// end of each.
pub(crate) fn render(painter: &Painter, field: &Field, columns: usize, lines: usize) -> String {
    let picture = painter.paint(field, None);
    let columns = columns.clamp(1, CHARACTERS_MAX).min(picture.width);
    let rows = 2 * lines.clamp(1, CHARACTERS_MAX);
    // Fill the width, unless the result is too high.
    let (width, height) = (picture.width, picture.height);
    let (across, down) = if height * columns <= width * rows {
        (columns, (height * columns / width).max(1))
    } else {
        let down = rows.min(height);
        ((width * down / height).clamp(1, columns), down)
    };
    // The mean colour of the image pixels that one terminal pixel covers.
    let mean = |x: usize, y: usize| -> [u8; 3] {
        let (left, right) = (x * width / across, ((x + 1) * width / across).max(x * width / across + 1));
        let (top, bottom) = (y * height / down, ((y + 1) * height / down).max(y * height / down + 1));
        let (mut sum, mut count) = ([0u64; 3], 0);
        // A few samples are enough in a large image.
        let (dx, dy) = (((right - left) / PROBES).max(1), ((bottom - top) / PROBES).max(1));
        for row in (top..bottom).step_by(dy) {
            for column in (left..right).step_by(dx) {
                let colour = picture.palette[usize::from(picture.pixels[row * width + column])];
                sum.iter_mut().zip(colour).for_each(|(sum, part)| *sum += u64::from(part));
                count += 1;
            }
        }
        sum.map(|sum| (sum / count) as u8)
    };
    let mut text = String::new();
    for line in 0..down.div_ceil(2) {
        let (mut front, mut back) = (None, None);
        for x in 0..across {
            let upper = mean(x, 2 * line);
            let lower = (2 * line + 1 < down).then(|| mean(x, 2 * line + 1));
            if front != Some(upper) {
                let [r, g, b] = upper;
                let _ = write!(text, "\x1b[38;2;{r};{g};{b}m");
            }
            if let Some([r, g, b]) = lower.filter(|_| back != lower) {
                let _ = write!(text, "\x1b[48;2;{r};{g};{b}m");
            }
            (front, back) = (Some(upper), lower);
            text.push('▀');
        }
        text.push_str("\x1b[0m\n");
    }
    text
}

/// Samples along each axis per terminal pixel.
const PROBES: usize = 4;
