//! Renders frames as images: values as colours, solid cells grey, small grids enlarged.
use kernels_grids::Region;
use kernels_grids::any_tile::blocks;
use kernels_simulations::{Colours, Field, Simulation};

use super::colours::{SOLID, level, palette, range};

/// Most pixels per cell along each axis.
const SCALE_MAX: usize = 8;

/// Renders frames of one output region of a simulation.
pub(crate) struct Painter {
    colours: Colours,
    range: Option<[f32; 2]>,
    /// Whether y points up.
    upright: bool,
    /// Blocks of `stride` cells along x and y.
    size: [usize; 2],
    /// Pixels of a block along each axis.
    scale: usize,
    /// Per block; empty if no cell is solid.
    solid: Vec<bool>,
}

/// An image of at most 256 colours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Picture {
    /// Pixels along x.
    pub width: usize,
    /// Pixels along y.
    pub height: usize,
    /// Palette indices, top row first.
    pub pixels: Vec<u8>,
    /// Red, green and blue per index.
    pub palette: [[u8; 3]; 256],
}

impl Painter {
    /// A painter for a region sampled every `stride` cells (see `Simulation::output_view`). Without `range`, each frame has
    /// its own.
    pub(crate) fn new(
        simulation: &Simulation,
        colours: Colours,
        range: Option<[f32; 2]>,
        (region, stride): (Region, usize),
        size_max: usize,
    ) -> Self {
        let [width, height, _] = blocks(region, stride).size();
        let z = region.start[2];
        let mut solid = Vec::with_capacity(width * height);
        for y in 0..height {
            solid.extend((0..width).map(|x| {
                // A block that begins before the region is sampled at its first cell, which may lie outside.
                let at =
                    [region.start[0] / stride * stride + x * stride, region.start[1] / stride * stride + y * stride, z];
                simulation.is_solid(at)
            }));
        }
        if !solid.contains(&true) {
            solid = Vec::new();
        }
        let scale = (size_max / width.max(height).max(1)).clamp(1, SCALE_MAX);
        Self { colours, range, upright: simulation.is_upright(), size: [width, height], scale, solid }
    }

    /// Width and height of the images in pixels.
    pub(crate) fn size(&self) -> [usize; 2] {
        self.size.map(|size| size * self.scale)
    }

    pub(super) fn colours(&self) -> Colours {
        self.colours
    }

    /// Minimum and maximum of a frame over non-solid cells; symmetric around 0 for a diverging palette.
    pub(crate) fn range_of(&self, field: &Field) -> [f32; 2] {
        let fluid = |at: &usize| !self.solid.get(*at).copied().unwrap_or(false);
        let values = field.values.iter().zip(0..).filter(|(_, at)| fluid(at)).map(|(value, _)| *value);
        range(self.colours, values)
    }

    /// Renders the first layer of a frame. `over` takes precedence over the output's own range.
    ///
    /// # Panics
    /// The frame has another size than the painter.
    pub(crate) fn paint(&self, field: &Field, over: Option<[f32; 2]>) -> Picture {
        let [width, height] = self.size;
        assert_eq!(field.size[..2], self.size, "a frame of the painter's size");
        let range = over.or(self.range).unwrap_or_else(|| self.range_of(field));
        let mut pixels = Vec::with_capacity(width * height * self.scale * self.scale);
        let mut row = Vec::with_capacity(width * self.scale);
        for y in 0..height {
            let y = if self.upright { height - 1 - y } else { y };
            row.clear();
            for x in 0..width {
                let at = y * width + x;
                let solid = self.solid.get(at).copied().unwrap_or(false);
                let colour = if solid { SOLID } else { level(field.values[at], range) };
                row.extend(std::iter::repeat_n(colour, self.scale));
            }
            (0..self.scale).for_each(|_| pixels.extend_from_slice(&row));
        }
        let [width, height] = self.size();
        Picture { width, height, pixels, palette: palette(self.colours) }
    }
}

impl Picture {
    /// Encodes the image as a PNG file.
    ///
    /// # Panics
    /// Never: writing to memory does not fail.
    pub(crate) fn png(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Indexed);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.set_palette(self.palette.concat());
        encoder.set_compression(png::Compression::Balanced);
        // Indices of neighbouring pixels do not predict each other, so filters do not help.
        encoder.set_filter(png::Filter::NoFilter);
        let mut writer = encoder.write_header().expect("writing to memory");
        writer.write_image_data(&self.pixels).expect("pixels match the header");
        writer.finish().expect("writing to memory");
        bytes
    }
}
