//! Writes rectangles and text as SVG, and the colours of ranks and steps.
//!
//! Hue: the rank that computes; ranks of a grid that differ only in their heads have the same hue
//! ([`Rings`](super::rings::Rings)). Lightness: the ring step.

/// SVG document under construction. All lengths are in pixels.
#[derive(Debug, Default)]
pub(super) struct Svg {
    body: String,
}

/// Rectangle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Area {
    /// Left edge.
    pub(super) x: f64,
    /// Top edge.
    pub(super) y: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

/// Returns the rectangle with this left and top edge.
pub(super) const fn area(x: f64, y: f64, width: f64, height: f64) -> Area {
    Area { x, y, width, height }
}

/// Attributes of a heading.
pub(super) const HEADING: &str = "font-size=\"15\" fill=\"#111\" font-weight=\"600\"";
/// Attributes of a text that explains.
pub(super) const NOTE: &str = "font-size=\"12\" fill=\"#555\"";
/// Attributes of a figure.
pub(super) const FIGURE: &str = "font-size=\"12\" fill=\"#111\"";
/// Attributes of a short dark text right of a point, left of it, or around it.
pub(super) const LABEL: &str = "font-size=\"11\" fill=\"#333\"";
pub(super) const LABEL_LEFT: &str = "font-size=\"11\" text-anchor=\"end\" fill=\"#333\"";
pub(super) const LABEL_AROUND: &str = "font-size=\"11\" text-anchor=\"middle\" fill=\"#333\"";
/// Attributes of the title of an axis, around a point.
pub(super) const AXIS: &str = "font-size=\"13\" text-anchor=\"middle\" fill=\"#333\"";
/// Attributes of a name on a coloured strip, around a point.
pub(super) const ON_COLOUR: &str = "font-size=\"11\" text-anchor=\"middle\" fill=\"#fff\"";
/// Colour of what is empty.
pub(super) const EMPTY: &str = "#f1f1f1";

impl Svg {
    /// Adds a filled rectangle.
    pub(super) fn rect(&mut self, area: Area, fill: &str, opacity: f64) {
        let [x, y, width, height] = [area.x, area.y, area.width, area.height].map(short);
        let opacity = match opacity {
            1.0 => String::new(),
            _ => format!(" fill-opacity=\"{}\"", short(opacity)),
        };
        self.body += &format!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"\
             {opacity}/>\n"
        );
    }

    /// Adds a text with its baseline at (x, y).
    pub(super) fn text(&mut self, x: f64, y: f64, attributes: &str, text: &str) {
        let [x, y] = [x, y].map(short);
        let text = escape(text);
        self.body += &format!("<text x=\"{x}\" y=\"{y}\" {attributes}>{text}</text>\n");
    }

    /// Adds a text that is rotated to read upwards.
    pub(super) fn upward(&mut self, x: f64, y: f64, attributes: &str, text: &str) {
        let turn = format!("{attributes} transform=\"rotate(-90 {} {})\"", short(x), short(y));
        self.text(x, y, &turn, text);
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
        let numbers = [1.0, 0.25, -0.1, 100.0].map(short);
        assert_eq!(numbers, ["1", "0.25", "-0.1", "100"]);
        assert_eq!(escape("a<b & \"c\""), "a&lt;b &amp; &quot;c&quot;");
        assert_eq!(colour(0, 4, 0, 4), "hsl(215,62%,38%)");
        assert_ne!(colour(0, 4, 0, 4), colour(0, 4, 3, 4));
        assert_ne!(colour(0, 4, 0, 4), colour(1, 4, 0, 4));
    }
}
