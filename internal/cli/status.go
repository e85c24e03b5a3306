package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"

	"csi-registrar/internal/config"
	"csi-registrar/internal/control"
	"csi-registrar/internal/status"
)

func setupStatus(fs *flag.FlagSet) runner {
	o := statusOptions{root: rootFlag(fs)}
	fs.BoolVar(&o.json, "json", false, "print the status document as JSON; with --watch one for each change")
	fs.BoolVar(&o.watch, "watch", false, "show the status again at each change, until interrupted")
	return func(ctx context.Context, e *env, args []string) error {
		switch {
		case len(args) > 1:
			return usagef(nil, "unexpected argument %q", args[1])
		case len(args) == 1:
			o.driver = args[0]
		}
		if err := driverArgs(args...); err != nil {
			return err
		}
		if o.watch {
			return watchStatus(ctx, e, o)
		}
		doc, err := control.NewClient(control.Path(*o.root)).Status(ctx)
		if err != nil {
			return clientError(err)
		}
		s, err := doc.Status()
		if err != nil {
			return err
		}
		doc, s = addVolumes(ctx, doc, s)
		return showStatus(e, o, doc, s)
	}
}

type statusOptions struct {
	root        *string
	driver      string // if set, show only this driver, with all details
	json, watch bool
}

// showStatus prints a document. It returns an error without text if the document shows the reason.
func showStatus(e *env, o statusOptions, doc control.Document, s status.Document) (err error) {
	if err := o.checkDriver(s); err != nil {
		return err
	}
	if o.json {
		err = printDocument(e, o, doc, "  ")
	} else {
		_, err = fmt.Fprint(e.stdout, o.text(s, e))
	}
	return errors.Join(err, o.exitError(s))
}

// text formats the table, or one driver with all details.
func (o statusOptions) text(s status.Document, e *env) string {
	// The name of a driver that has not reported it yet is empty.
	if d, ok := s.Driver(o.driver); ok && o.driver != "" {
		return driverText(d, s.ConfigError, e.page(), e.now())
	}
	if n := len(config.Load(config.Source{Root: *o.root}).Config.Drivers); len(s.Drivers) == 0 && s.ConfigError == "" && n > 0 {
		return fmt.Sprintf("The daemon has not yet read the files, which configure %s: try again, or run csi-registrar reload.\n", count(n, "driver"))
	}
	return statusTable(s, e.page(), e.now())
}

func (o statusOptions) checkDriver(s status.Document) error {
	if _, ok := s.Driver(o.driver); ok || o.driver == "" {
		return nil
	}
	err := fmt.Errorf("cannot show %s: no driver of that name is configured", o.driver)
	if s.ConfigError != "" {
		return hinted(err, "the configuration has errors, which may be the reason: csi-registrar config check")
	}
	return hinted(err, "csi-registrar status lists the drivers")
}

// exitError returns nil if everything that is shown is registered and serves.
func (o statusOptions) exitError(s status.Document) error {
	d, ok := s.Driver(o.driver)
	if ok && registered(d) && !d.Down() || o.driver == "" && len(s.Pending())+len(s.Down()) == 0 {
		return nil
	}
	return &exitError{code: exitFailed}
}

// printDocument prints the document as the daemon wrote it; if a driver is named, without the other
// drivers. It is indented unless indent is empty.
func printDocument(e *env, o statusOptions, doc control.Document, indent string) error {
	if o.driver != "" {
		var err error
		if doc, err = keepDriver(doc, o.driver); err != nil {
			return err
		}
	}
	var out bytes.Buffer
	if indent == "" {
		out.Write(bytes.TrimSpace(doc))
	} else if err := json.Indent(&out, bytes.TrimSpace(doc), "", indent); err != nil {
		return fmt.Errorf("cannot read the status document: %w", err)
	}
	out.WriteByte('\n')
	_, err := e.stdout.Write(out.Bytes())
	return err
}

// keepDriver removes the other drivers from a document. Fields that this program does not know
// stay.
func keepDriver(doc control.Document, name string) (control.Document, error) {
	whole := map[string]json.RawMessage{}
	var drivers, kept []json.RawMessage
	err := json.Unmarshal(doc, &whole)
	if err == nil {
		err = json.Unmarshal(whole["drivers"], &drivers)
	}
	for _, d := range drivers {
		var one struct{ Name string }
		if json.Unmarshal(d, &one) == nil && one.Name == name {
			kept = append(kept, d)
		}
	}
	if err == nil {
		whole["drivers"], err = json.Marshal(kept)
	}
	if err == nil {
		doc, err = json.Marshal(whole)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot read the status document: %w", err)
	}
	return doc, nil
}
