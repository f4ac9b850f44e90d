//! Frames as pictures: each value a colour, solid cells grey, small grids enlarged.
use kernels::grid::Region;
use kernels::grid::simulation::{Colours, Field, Simulation, blocks};

use super::colours::{SOLID, level, palette, range};

/// A cell becomes so many pixels along each axis at most.
const SCALE_MAX: usize = 8;

/// Paints frames of one place of a simulation.
pub struct Painter {
    colours: Colours,
    range: Option<[f32; 2]>,
    /// Whether y goes upwards.
    upright: bool,
    /// Blocks along x and y.
    size: [usize; 2],
    /// Pixels of a block along each axis.
    scale: usize,
    /// By block; none if no cell is solid.
    solid: Vec<bool>,
}

/// A picture of at most 256 colours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Pixels along x.
    pub width: usize,
    /// Pixels along y.
    pub height: usize,
    /// Colours by number, the upper row first.
    pub pixels: Vec<u8>,
    /// Red, green and blue by number.
    pub palette: [[u8; 3]; 256],
}

impl Painter {
    /// For frames that show a region every `stride` cells (see `Simulation::shown`). Without a range each frame has its own.
    pub fn new(
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
                // Blocks that begin before the region are not looked into.
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

    /// How large pictures are.
    pub fn size(&self) -> [usize; 2] {
        self.size.map(|size| size * self.scale)
    }

    pub(super) fn colours(&self) -> Colours {
        self.colours
    }

    /// The least and the greatest value of a frame where no cell is solid; both signs alike if the colours are.
    pub fn range_of(&self, field: &Field) -> [f32; 2] {
        let fluid = |at: &usize| !self.solid.get(*at).copied().unwrap_or(false);
        let values = field.values.iter().zip(0..).filter(|(_, at)| fluid(at)).map(|(value, _)| *value);
        range(self.colours, values)
    }

    /// Paints a frame, of which the first layer is shown. `over` goes before the output's own range.
    ///
    /// # Panics
    /// The frame is of another size: who paints owns the frames.
    pub fn paint(&self, field: &Field, over: Option<[f32; 2]>) -> Picture {
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
    /// As a PNG file.
    ///
    /// # Panics
    /// Never: memory takes all that is written to it.
    pub fn png(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width as u32, self.height as u32);
        encoder.set_color(png::ColorType::Indexed);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.set_palette(self.palette.concat());
        encoder.set_compression(png::Compression::Balanced);
        // Neighbours' numbers say nothing about a colour's.
        encoder.set_filter(png::Filter::NoFilter);
        let mut writer = encoder.write_header().expect("a header into memory");
        writer.write_image_data(&self.pixels).expect("as many pixels as the header says, into memory");
        writer.finish().expect("an end into memory");
        bytes
    }
}
