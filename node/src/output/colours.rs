//! Colour palettes: 254 indices for values, one for solid cells, one for values that are not finite.
use kernels_simulations::Colours;

/// Number of colours for values.
pub(super) const LEVELS: usize = 254;
/// Index of solid cells.
pub(super) const SOLID: u8 = 254;
/// Index of infinite values and NaN.
pub(super) const NOT_FINITE: u8 = 255;

/// Red, green and blue of each index.
pub(super) fn palette(colours: Colours) -> [[u8; 3]; 256] {
    let stops: &[[u8; 3]] = match colours {
        Colours::Grey => &[[0, 0, 0], [255, 255, 255]],
        // Matplotlib's viridis, sampled at equal distances.
        Colours::Viridis => &[
            [68, 1, 84],
            [71, 44, 122],
            [59, 81, 139],
            [44, 113, 142],
            [33, 144, 141],
            [39, 173, 129],
            [92, 200, 99],
            [170, 220, 50],
            [253, 231, 37],
        ],
        Colours::Fire => {
            &[[0, 0, 4], [51, 10, 94], [120, 28, 109], [187, 55, 84], [237, 105, 37], [252, 181, 25], [252, 255, 164]]
        }
        Colours::Diverging => &[
            [33, 60, 140],
            [67, 130, 195],
            [160, 200, 226],
            [247, 247, 247],
            [245, 180, 145],
            [214, 96, 77],
            [128, 20, 38],
        ],
    };
    let mut palette = [[0; 3]; 256];
    let last = stops.len() - 1;
    for (level, colour) in palette.iter_mut().enumerate().take(LEVELS) {
        let (at, whole) = (level * last, LEVELS - 1);
        let (stop, rest) = ((at / whole).min(last - 1), at - (at / whole).min(last - 1) * whole);
        *colour = std::array::from_fn(|part| {
            let (low, high) = (usize::from(stops[stop][part]), usize::from(stops[stop + 1][part]));
            ((low * (whole - rest) + high * rest + whole / 2) / whole) as u8
        });
    }
    palette[usize::from(SOLID)] = [110, 110, 110];
    palette[usize::from(NOT_FINITE)] = [255, 0, 255];
    palette
}

/// The palette index of a value.
pub(super) fn level(value: f32, [low, high]: [f32; 2]) -> u8 {
    if !value.is_finite() {
        return NOT_FINITE;
    }
    let share = f64::from(value - low) / f64::from(high - low);
    (share.clamp(0.0, 1.0) * (LEVELS - 1) as f64).round() as u8
}

/// The values at both ends of the palette for a frame; symmetric around 0 for a diverging palette.
pub(super) fn range(colours: Colours, values: impl Iterator<Item = f32>) -> [f32; 2] {
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    for value in values.filter(|value| value.is_finite()) {
        (low, high) = (low.min(value), high.max(value));
    }
    wider(colours, [low, high])
}

/// Widens a range until it can be divided by its length.
pub(super) fn wider(colours: Colours, [low, high]: [f32; 2]) -> [f32; 2] {
    let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
    let (low, high) = match colours {
        Colours::Diverging => {
            let most = low.abs().max(high.abs());
            (-most, most)
        }
        Colours::Grey | Colours::Viridis | Colours::Fire => (low, high),
    };
    // Halve each end first, so that the difference of the largest floats does not overflow.
    if high / 2.0 - low / 2.0 > f32::MIN_POSITIVE && (high - low).is_finite() {
        return [low, high];
    }
    let (low, high) = (low.clamp(-1e37, 1e37), high.clamp(-1e37, 1e37));
    let little = (low.abs().max(high.abs()) * 1e-6).max(1e-30);
    if high > low { [low, high] } else { [low - little, high + little] }
}
