//! Writes rectangles and text as SVG, and the colours of ranks and steps.
//!
//! Hue: the rank that computes; ranks of a grid that differ only in their heads have the same hue
//! ([`Rings`](super::rings::Rings)). Lightness: the ring step.

use std::fmt::Write;

/// SVG document under construction.
#[derive(Debug, Default)]
pub(super) struct Svg {
    body: String,
}

/// Rectangle, in pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    /// Left edge.
    pub(super) x: f64,
    /// Top edge.
    pub(super) y: f64,
    /// Width.
    pub(super) width: f64,
    /// Height.
    pub(super) height: f64,
}

/// Returns the rectangle with this left and top edge.
pub(super) const fn area(x: f64, y: f64, width: f64, height: f64) -> Area {
    Area { x, y, width, height }
}

/// Point, in pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    /// Distance from the left edge.
    pub(super) x: f64,
    /// Distance from the top edge.
    pub(super) y: f64,
}

/// Returns the point (x, y).
pub(super) const fn at(x: f64, y: f64) -> Point {
    Point { x, y }
}

/// Horizontal alignment of a text to its point: the value of `text-anchor`.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    /// The text starts at the point.
    Start,
    /// The text is centred at the point.
    Middle,
    /// The text ends at the point.
    End,
}

impl Svg {
    /// Adds a filled rectangle.
    pub(super) fn rect(&mut self, area: Area, fill: &str, opacity: f64) {
        let [x, y, width, height] = [area.x, area.y, area.width, area.height].map(short);
        let opacity = match opacity {
            1.0 => String::new(),
            _ => format!(" fill-opacity=\"{}\"", short(opacity)),
        };
        self.push(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"{opacity}/>"
        ));
    }

    /// Adds a text of `size` pixels with its baseline at `at`.
    pub(super) fn text(&mut self, at: Point, size: f64, anchor: Anchor, fill: &str, text: &str) {
        self.text_with(at, size, anchor, fill, text, "");
    }

    /// Adds a bold text.
    pub(super) fn heading(&mut self, at: Point, size: f64, text: &str) {
        self.text_with(at, size, Anchor::Start, "#111", text, " font-weight=\"600\"");
    }

    /// Adds a text that explains.
    pub(super) fn note(&mut self, at: Point, text: &str) {
        self.text(at, 12.0, Anchor::Start, "#555", text);
    }

    /// Adds a short dark text beside a bar or a box.
    pub(super) fn label(&mut self, at: Point, anchor: Anchor, text: &str) {
        self.text(at, 11.0, anchor, "#333", text);
    }

    /// Adds a centred text that is rotated to read upwards.
    pub(super) fn upward(&mut self, at: Point, size: f64, fill: &str, text: &str) {
        let turn = format!(" transform=\"rotate(-90 {} {})\"", short(at.x), short(at.y));
        self.text_with(at, size, Anchor::Middle, fill, text, &turn);
    }

    /// Returns the document.
    pub(super) fn finish(self, width: f64, height: f64, title: &str) -> String {
        let [width, height] = [width, height].map(short);
        let title = escape(title);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" shape-rendering=\"crispEdges\" \
             font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\">\n<title>{title}</title>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{}</svg>\n",
            self.body
        )
    }

    fn text_with(
        &mut self,
        at: Point,
        size: f64,
        anchor: Anchor,
        fill: &str,
        text: &str,
        more: &str,
    ) {
        let [x, y, size] = [at.x, at.y, size].map(short);
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let text = escape(text);
        self.push(format_args!(
            "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\"{anchor} fill=\"{fill}\"{more}>{text}</text>"
        ));
    }

    fn push(&mut self, shape: std::fmt::Arguments<'_>) {
        // writing to a String cannot fail
        let written = self.body.write_fmt(shape).and_then(|()| self.body.write_char('\n'));
        debug_assert!(written.is_ok());
    }
}

/// Formats a number with at most two decimals and without trailing zeros.
fn short(number: f64) -> String {
    let text = format!("{number:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Lightness of the first and of the last step, in percent: dark enough for white text, and light
/// enough to differ from the background.
const LIGHTNESS: (f64, f64) = (38.0, 84.0);

/// Returns the colour of `place` of `places` in step `step` of `steps`.
pub(super) fn colour(place: usize, places: usize, step: usize, steps: usize) -> String {
    let share = step as f64 / steps.saturating_sub(1).max(1) as f64;
    shade(place, places, LIGHTNESS.0 + (LIGHTNESS.1 - LIGHTNESS.0) * share.min(1.0))
}

/// Returns the colour of a place without a step.
pub(super) fn colour_of_place(place: usize, places: usize) -> String {
    shade(place, places, 50.0)
}

/// Returns the hue of a place as a colour of CSS. The first is blue, which contrasts with white.
fn shade(place: usize, places: usize, lightness: f64) -> String {
    let turn = place as f64 / places.max(1) as f64;
    let hue = (215.0 + 360.0 * turn) % 360.0;
    format!("hsl({},62%,{}%)", short(hue), short(lightness))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_text_is_escaped_and_colours_differ() {
        assert_eq!(
            [short(1.0), short(0.25), short(-0.1), short(100.0)],
            ["1", "0.25", "-0.1", "100"]
        );
        assert_eq!(escape("a<b & \"c\""), "a&lt;b &amp; &quot;c&quot;");
        assert_eq!(colour(0, 4, 0, 4), "hsl(215,62%,38%)");
        assert_ne!(colour(0, 4, 0, 4), colour(0, 4, 3, 4));
        assert_ne!(colour(0, 4, 0, 4), colour(1, 4, 0, 4));
    }
}
