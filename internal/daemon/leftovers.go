package daemon

import (
	"context"
	"time"

	"csi-registrar/internal/node/config"
)

// leftoversAgain is the pause before leftovers that could not be removed are tried again.
const leftoversAgain = 10 * time.Second

// removeLeftovers removes what an earlier process left of drivers that the configuration does not
// have, whenever that changes. It does not delay a start.
func (r *configReloader) removeLeftovers(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-r.ready:
	}
	var c *config.Config
	var names []string // in the descriptor store
	var again <-chan time.Time
	for last := ""; ; {
		select {
		case <-ctx.Done():
			return
		case c = <-r.leftovers:
		case <-again:
		}
		names, again = append(names, r.parts.disown(c)...), nil
		err := r.parts.removeLeftovers(ctx, c, names)
		if err == nil {
			names, last = nil, ""
			continue
		}
		if text := err.Error(); text != last {
			last = text
			r.note("remove what an earlier process left", err)
		}
		again = time.After(leftoversAgain)
	}
}
