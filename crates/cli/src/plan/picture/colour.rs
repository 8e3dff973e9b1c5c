//! Colours: the hue is that of the computing rank, of a grid that of all ranks which differ in their
//! heads only ([`Rings`]). The lightness is that of the ring step.
//!
//! [`Rings`]: crate::plan::rings::Rings

/// Lightness of the first and of the last step, in percent: dark enough for white text, and light
/// enough to differ from the background.
const LIGHTNESS: (f64, f64) = (38.0, 84.0);

/// Returns the colour of `place` of `places` in step `step` of `steps`.
pub(super) fn of(place: usize, places: usize, step: usize, steps: usize) -> String {
    let share = step as f64 / steps.saturating_sub(1).max(1) as f64;
    shade(place, places, LIGHTNESS.0 + (LIGHTNESS.1 - LIGHTNESS.0) * share.min(1.0))
}

/// Returns the colour of a place without a step.
pub(super) fn of_place(place: usize, places: usize) -> String {
    shade(place, places, 50.0)
}

/// Returns the colour of text on the colour of a step: white on dark, black on light.
pub(super) fn ink(step: usize, steps: usize) -> &'static str {
    if step * 5 < steps.saturating_sub(1).max(1) * 2 { "#fff" } else { "#111" }
}

fn shade(place: usize, places: usize, lightness: f64) -> String {
    // starts at blue, which contrasts with white
    let turn = place as f64 / places.max(1) as f64;
    let hue = (215.0 + 360.0 * turn) % 360.0;
    let (red, green, blue) = rgb(hue, 0.62, lightness / 100.0);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// Converts hue in degrees, saturation and lightness in 0..1 to bytes.
///
/// # Source
/// CSS Color 4, section 7.1: the formula of HSL to sRGB.
fn rgb(hue: f64, saturation: f64, lightness: f64) -> (u8, u8, u8) {
    let amplitude = saturation * lightness.min(1.0 - lightness);
    let channel = |offset: f64| {
        let k = (offset + hue / 30.0) % 12.0;
        let value = lightness - amplitude * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0);
        (value * 255.0).round().clamp(0.0, 255.0) as u8
    };
    (channel(0.0), channel(8.0), channel(4.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hues_convert_to_rgb_and_colours_differ() {
        assert_eq!(rgb(0.0, 1.0, 0.5), (255, 0, 0));
        assert_eq!(rgb(120.0, 1.0, 0.5), (0, 255, 0));
        assert_eq!(rgb(240.0, 1.0, 0.5), (0, 0, 255));
        assert_ne!(of(0, 4, 0, 4), of(0, 4, 3, 4));
        assert_ne!(of(0, 4, 0, 4), of(1, 4, 0, 4));
    }
}
