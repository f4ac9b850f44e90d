//! The search against a plain one: one scale at a time, all levels of all subsets, and the code of every step kept.
use super::*;

/// How each state was reached at one element: the state before, and the code.
type Steps = [(u8, u8); STATES];

fn plain_search(blocks: &[[f32; ROTATED]]) -> (Vec<u8>, Vec<u8>) {
    let mut errors = [f32::INFINITY; STATES];
    errors[0] = 0.0;
    let (mut scales, mut steps) = (Vec::new(), Vec::<Steps>::new());
    for block in blocks {
        let mean_square = block.iter().fold(0.0, |sum, x| sum + x * x) * (1.0 / ROTATED as f32);
        let reaches = |scale: &i32| mean_square >= sigma(*scale as u8) * sigma(*scale as u8) * SIXTEENTHS[1];
        let tried: Vec<u8> = match (0..i32::from(ZEROS)).find(reaches) {
            Some(root) => TRIED.iter().map(|more| (root + more).clamp(0, i32::from(ZEROS) - 1) as u8).collect(),
            None => vec![ZEROS],
        };
        let mut best: Option<(f32, u8, [f32; STATES], Vec<Steps>)> = None;
        for scale in tried {
            let (after, path) = plain_walk(block, scale, errors);
            let least = after.iter().copied().fold(f32::INFINITY, f32::min);
            if best.as_ref().is_none_or(|(error, ..)| least < *error) {
                best = Some((least, scale, after, path));
            }
        }
        let (_, scale, after, path) = best.unwrap();
        errors = after;
        scales.push(scale);
        steps.extend(path);
    }
    let mut state = (0..STATES).fold(0, |best, state| if errors[state] < errors[best] { state } else { best });
    let mut codes = vec![0; steps.len()];
    for (code, steps) in codes.iter_mut().zip(&steps).rev() {
        let (before, taken) = steps[state];
        *code = taken;
        state = usize::from(before);
    }
    (scales, codes)
}

fn plain_walk(block: &[f32; ROTATED], scale: u8, mut errors: [f32; STATES]) -> ([f32; STATES], Vec<Steps>) {
    let mut path = Vec::new();
    for &x in block {
        let mut after = [f32::INFINITY; STATES];
        let mut steps = [(0, 0); STATES];
        for (state, &error) in errors.iter().enumerate() {
            for bit in 0..2 {
                let transition = 2 * state + bit;
                let (more, code) = plain_nearest(x, sigma(scale), subset(transition));
                let (to, sum) = (transition % STATES, error + more);
                if sum < after[to] {
                    (after[to], steps[to]) = (sum, (state as u8, (8 * bit) as u8 | code));
                }
            }
        }
        errors = after;
        path.push(steps);
    }
    (errors, path)
}

fn plain_nearest(x: f32, sigma: f32, subset: usize) -> (f32, u8) {
    let mut best = (f32::INFINITY, 0);
    for number in 0..8 {
        let difference = x - sigma * level(4 * number + subset);
        if difference * difference < best.0 {
            best = (difference * difference, number as u8);
        }
    }
    best
}

#[test]
fn the_search_finds_the_scales_and_codes_of_a_plain_one() {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    for round in 0..240 {
        let mut blocks = vec![[0.0f32; ROTATED]; 1 + round % 9];
        for (number, block) in blocks.iter_mut().enumerate() {
            for x in block {
                let gaussian = (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
                *x = match round % 6 {
                    0 | 1 => gaussian / 8.0,
                    // Ties.
                    2 => (gaussian * 2.0).round() / 16.0,
                    // Blocks that count as zeros, and such that nearly do.
                    3 => scaled(gaussian / 8.0, -4 * number as i32),
                    4 => [0.0, -0.0, 0.5, -0.5][(uniform() * 4.0) as usize],
                    _ => {
                        if uniform() < 0.02 {
                            gaussian / 8.0
                        } else {
                            0.0
                        }
                    }
                };
            }
        }
        assert_eq!(search(&blocks), plain_search(&blocks), "round {round}");
    }
}
